"""What a run looks like: sentences, sparse lines, JSON lines, a bar."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from dspark.cli.display import Bar, Events, Lines, Several, sentence, shown
from dspark.cli.options import duration, print_table, size
from dspark.errors import SettingsError
from dspark.workspace.listener import Outcome

ROW = {
    "time": 1.0,
    "stage": "train@b",
    "task": "train",
    "unit": "steps",
    "done": 120,
    "total": 300,
    "event": "progress",
    "per_second": 2.3111,
    "eta_seconds": 78.0,
    "loss": 1.23456,
}


def test_a_progress_line_says_how_far_how_fast_and_how_long() -> None:
    assert sentence(ROW) == "train: 120/300 steps, 2.31/s, 78 s left, loss 1.235"
    assert sentence({"event": "note", "message": "a word"}) == "a word"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (89, "89 s"), (200, "3 min 20 s"), (3900, "1 h 05 min"), (1e7, "116 days")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(512, "512 B"), (6900, "6.9 kB"), (93_000_000, "93 MB"), (1.2e9, "1.2 GB"), (38.1e12, "38.1 TB")],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


def test_lines_tell_beginnings_ends_and_notes_and_nothing_of_what_needed_no_run() -> None:
    out = io.StringIO()
    lines = Lines(out)
    lines.stage_started("train@b")
    lines.stage_progress(ROW)  # too soon after the beginning
    lines.stage_progress({"event": "note", "message": "a word"})
    lines.stage_ended(Outcome("train@b", "ran", 12.0))
    lines.stage_ended(Outcome("prompts@b", "up to date"))
    lines.stage_ended(Outcome("export@b", "restored"))
    lines.note("mended something")
    assert out.getvalue().splitlines() == [
        "train@b ...",
        "  a word",
        "train@b: ran in 12 s",
        "export@b: restored",
        "mended something",
    ]


def test_progress_lines_are_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("dspark.cli.display.time.monotonic", lambda: now[0])
    out = io.StringIO()
    lines = Lines(out)
    lines.stage_started("train@b")
    for second in range(0, 61):
        now[0] = float(second)
        lines.stage_progress(ROW)
    assert len(out.getvalue().splitlines()) == 1 + 4  # at 15, 30, 45 and 60 s


def test_quiet_leaves_only_what_matters() -> None:
    out = io.StringIO()
    lines = Lines(out, quiet=True)
    lines.stage_started("train@b")
    lines.stage_ended(Outcome("train@b", "ran", 1.0))
    lines.note("mended something")
    assert out.getvalue() == "mended something\n"


def test_events_are_json_lines() -> None:
    out = io.StringIO()
    events = Several([Events(out)])
    events.stage_started("train@b")
    events.stage_progress(ROW)
    events.stage_ended(Outcome("train@b", "failed", 1.0, "no", "hint", 5, Path("x.log")))
    events.note("a word")
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [row.get("event") for row in rows] == ["stage_started", "progress", "stage_ended", "note"]
    assert rows[1] == ROW
    assert {key: rows[2][key] for key in ("stage", "status", "message", "exit_code", "log")} == {
        "stage": "train@b",
        "status": "failed",
        "message": "no",
        "exit_code": 5,
        "log": "x.log",
    }


def test_the_bar_shows_one_stage_and_leaves_a_line_for_each_that_ended() -> None:
    out = io.StringIO()
    with Bar(out) as bar:
        bar.stage_started("train@b")
        bar.stage_progress(ROW)
        bar.stage_progress({"event": "note", "message": "a [word] in brackets"})
        bar.stage_ended(Outcome("train@b", "ran", 12.0))
        bar.stage_ended(Outcome("prompts@b", "up to date"))
        bar.stage_progress(ROW)  # a late line of a stage that has ended
    text = out.getvalue()
    assert "train@b: ran in 12 s" in text
    assert "a [word] in brackets" in text
    assert "prompts@b: up to date" not in text


def test_events_go_to_a_file_beside_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    with shown(events=str(path)) as listener:
        listener.note("a word")
    assert json.loads(path.read_text())["message"] == "a word"
    assert capsys.readouterr().err == "a word\n"
    with shown(events="-", quiet=True) as listener:
        listener.stage_started("train@b")
    assert json.loads(capsys.readouterr().out)["stage"] == "train@b"


def test_events_that_cannot_be_written_are_a_mistake_of_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--events .*cannot be written"), shown(events=str(tmp_path / "no" / "x")):
        raise AssertionError("shown all the same")


def test_tables_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([("a", "1"), ("long", "2")], ("name", "x"))
    assert capsys.readouterr().out == "name  x\na     1\nlong  2\n"
    print_table([])
    assert capsys.readouterr().out == ""


def test_whoever_reads_may_go_away_and_a_disk_may_be_full(tmp_path: Path) -> None:
    """Showing a run never stops it: the others are told all the same."""
    reader, writer = os.pipe()
    os.close(reader)
    kept = io.StringIO()
    with Path("/dev/full").open("w") as full, os.fdopen(writer, "w") as broken:
        several = Several([Lines(broken), Events(full), Lines(kept)])
        several.stage_started("train@b")
        several.stage_progress(ROW)
        several.note("a word")
        several.stage_ended(Outcome("train@b", "ran", 12.0))
        for stream in (full, broken):  # what they could not take is not tried again when they are closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    assert kept.getvalue().splitlines() == ["train@b ...", "a word", "train@b: ran in 12 s"]


@pytest.mark.parametrize("kind", [Lines, Bar])
def test_a_run_says_which_stage_of_how_many_and_where_its_logs_are(kind: type[Lines | Bar], tmp_path: Path) -> None:
    """Nothing at all where nothing is done; what is no stage of the run (the target) has no number."""
    out = io.StringIO()
    listener = kind(out)
    listener.run_started(["prompts@b", "train@b", "package@b"], tmp_path / "run")
    assert out.getvalue() == ""
    listener.stage_started("target@b")
    listener.stage_ended(Outcome("target@b", "ran", 1.0))
    listener.stage_ended(Outcome("prompts@b", "up to date"))
    listener.stage_started("train@b")
    if isinstance(listener, Bar):
        assert listener._progress.tasks[-1].description == "[2/3] train@b"
    else:
        assert out.getvalue().splitlines()[1:] == ["target@b ...", "target@b: ran in 1.0 s", "[2/3] train@b ..."]
    assert out.getvalue().count("dspark logs STAGE") == 1
    listener.stage_ended(Outcome("train@b", "failed", 1.0))
    listener.stage_started("train@b")  # again, with features that were missing
    listener.stage_ended(Outcome("train@b", "ran", 1.0))
    listener.stage_started("package@b")
    if isinstance(listener, Lines):
        assert out.getvalue().splitlines()[-3:] == ["[2/3] train@b ...", "train@b: ran in 1.0 s", "[3/3] package@b ..."]


def test_programs_are_told_the_stages_of_a_run(tmp_path: Path) -> None:
    out = io.StringIO()
    Several([Events(out)]).run_started(["train@b"], tmp_path)
    row = json.loads(out.getvalue())
    assert (row["event"], row["stages"], row["folder"]) == ("run_started", ["train@b"], str(tmp_path))


def test_training_shows_its_estimate_of_tau() -> None:
    assert sentence(ROW | {"dev_anchor_tau": 1.5}).endswith("left, loss 1.235, dev anchor tau 1.5")
