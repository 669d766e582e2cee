"""Files are complete or absent, JSON is strict, digests are of content only."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from dspark.errors import DataError, Interrupted, SettingsError
from dspark.io import progress as progress_module
from dspark.io.atomic import atomic_path, replace_tree, write_if_changed, write_text
from dspark.io.digest import digest_json, digest_listing, digest_tree
from dspark.io.jsonfile import canonical_json, read_json, read_model, strict_loads, write_json, write_model
from dspark.io.jsonlines import read_jsonlines, write_jsonlines
from dspark.io.progress import EventProgress, Progress
from dspark.io.yamlfile import key_line, read_yaml

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=12,
)


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    schema_: str = Field(default="dspark/test/1", alias="schema")
    value: int
    note: str | None = None


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    write_text(target, "old")
    with pytest.raises(RuntimeError), atomic_path(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]


def test_an_unchanged_text_is_not_written_again(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file.txt"
    assert write_if_changed(target, "a")
    before = target.stat().st_mtime_ns
    assert not write_if_changed(target, "a")
    assert target.stat().st_mtime_ns == before
    assert write_if_changed(target, "b")


def test_a_finished_folder_replaces_the_old_one_whole(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "a").write_text("new")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stale").write_text("old")
    replace_tree(tmp_path / "new", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]


@given(json_values)
def test_canonical_json_round_trips_and_ignores_key_order(value: object) -> None:
    text = canonical_json(value)
    assert strict_loads(text) == value
    assert canonical_json(json.loads(text)) == text


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "[NaN]", "[Infinity]", "[-Infinity]", "{", ""])
def test_json_that_other_readers_would_disagree_on_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        strict_loads(text)


def test_nan_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_json(tmp_path / "x.json", {"tau": float("nan")})
    assert not (tmp_path / "x.json").exists()


def test_a_model_is_read_back_equal_and_absent_values_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_model(path, Record(value=3))
    assert json.loads(path.read_text()) == {"schema": "dspark/test/1", "value": 3}
    assert read_model(path, Record) == Record(value=3)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"schema": "dspark/test/2", "value": 1}', "dspark/test/2"),
        ('{"value": 1}', "None"),
        ('{"schema": "dspark/test/1", "value": "x", "extra": 1}', "extra"),
        ("not json", "not valid JSON"),
        ("[1]", "schema"),
    ],
)
def test_a_file_of_another_schema_or_shape_is_refused_with_the_reason(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(content)
    with pytest.raises(DataError, match=named) as caught:
        read_model(path, Record)
    assert str(path) in caught.value.message


def test_a_missing_file_is_named() -> None:
    with pytest.raises(DataError, match=r"nowhere\.json: file not found"):
        read_json(Path("nowhere.json"))


def test_json_lines_name_file_and_line_of_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert write_jsonlines(path, [{"a": 1}, {"a": "é"}]) == 2
    assert list(read_jsonlines(path)) == [{"a": 1}, {"a": "é"}]
    with path.open("a") as handle:
        handle.write("\n{bad\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:4"):
        list(read_jsonlines(path))
    with pytest.raises(DataError, match="file not found"):
        list(read_jsonlines(tmp_path / "none.jsonl"))


def test_digests_are_the_documented_sha256(tmp_path: Path) -> None:
    """Expected values from hashlib on the spelled-out bytes."""
    assert digest_json({"b": 1, "a": [1.5]}) == hashlib.sha256(b'{"a":[1.5],"b":1}').hexdigest()
    assert digest_listing({"b": "2", "a": "1"}) == hashlib.sha256(b"a 1\nb 2\n").hexdigest()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "f").write_bytes(b"x")
    inner = hashlib.sha256(b"x").hexdigest()
    assert digest_tree(tmp_path) == hashlib.sha256(f"sub/f {inner}\n".encode()).hexdigest()
    assert digest_tree(tmp_path / "sub" / "f") == inner
    assert digest_tree(tmp_path, skip=["sub/f"]) == hashlib.sha256(b"").hexdigest()


def test_yaml_is_read_as_version_1_2_and_mistakes_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("lr: 1e-5\nflag: on\ndeep:\n  key: 1\n")
    assert read_yaml(path) == {"lr": 1e-5, "flag": "on", "deep": {"key": 1}}
    assert key_line(path, "deep", "key") == 4
    assert key_line(path, "deep", "none") == 3
    assert key_line(tmp_path / "none.yaml", "x") is None
    path.write_text("a: [1\nb: 2\n")
    with pytest.raises(SettingsError, match=r"a\.yaml:\d+: not valid YAML"):
        read_yaml(path)
    with pytest.raises(SettingsError, match="file not found"):
        read_yaml(tmp_path / "none.yaml")


@pytest.fixture
def clear_stop():
    progress_module._stop.clear()
    yield
    progress_module._stop.clear()


def test_a_requested_stop_is_obeyed_at_the_next_safe_point_and_after_it_was_written(
    tmp_path: Path, clear_stop: None
) -> None:
    events = tmp_path / "events.jsonl"
    progress = EventProgress(events, "train")
    progress.start("training", total=3, done=1)
    progress.advance(loss=0.5)
    progress.note("careful")
    progress_module.request_stop()
    with pytest.raises(Interrupted):
        progress.advance()
    rows = [json.loads(line) for line in events.read_text().splitlines()]
    assert rows[0]["event"] == "start"
    assert rows[-1]["done"] == 3
    assert {row["stage"] for row in rows} == {"train"}
    assert not isinstance(Interrupted("x"), Exception)


def test_the_first_signal_asks_and_the_second_one_stops(clear_stop: None) -> None:
    assert threading.current_thread() is threading.main_thread()
    before = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    try:
        progress_module.install_stop_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        assert progress_module.stop_requested()
        with pytest.raises(Interrupted):
            Progress().advance()
        with pytest.raises(Interrupted, match="SIGINT"):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
