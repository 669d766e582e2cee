from __future__ import annotations

import json
import runpy
from collections import Counter
from pathlib import Path

import pytest

from dspark.config.models import SplitShares
from dspark.corpus.catalogue import add_domain, read_domain_spec
from dspark.corpus.domains import read_domain
from dspark.corpus.splits import SPLITS, assign_split
from dspark.errors import DataError, SettingsError

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/retrain"


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "pipeline" / "domains"
    found.mkdir(parents=True)
    return found


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "somewhere" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text('{"prompt": "one"}\noops\n{"prompt": "two"}\n')
    return path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_file_of_prompts_becomes_a_domain_that_outlives_it(folder, prompts):
    data = prompts.read_bytes()
    assert add_domain(folder, "mine", prompts)
    prompts.unlink()
    reading = read_domain(read_domain_spec(folder, "mine"), folder)
    assert [prompt.messages[0].content for prompt in reading.prompts] == ["one", "two"]
    assert [row.line for row in reading.rejections] == [2]
    assert contents(folder)["mine.jsonl"] == data


def test_the_same_prompts_again_change_nothing_and_others_are_refused(folder, prompts):
    add_domain(folder, "mine", prompts)
    before = contents(folder)
    assert not add_domain(folder, "mine", prompts)
    assert not add_domain(folder, "mine", folder / "mine.jsonl")
    prompts.write_text('{"prompt": "three"}\n')
    with pytest.raises(SettingsError, match="domain 'mine' is there with other prompts"):
        add_domain(folder, "mine", prompts)
    assert contents(folder) == before


def test_what_a_kill_left_between_the_two_files_is_completed_or_refused(folder, prompts):
    (folder / "mine.jsonl").write_bytes(prompts.read_bytes())
    assert add_domain(folder, "mine", prompts)
    (folder / "other.jsonl").write_text('{"prompt": "a file of somebody else"}\n')
    with pytest.raises(SettingsError, match="with other prompts"):
        add_domain(folder, "other", prompts)
    assert not (folder / "other.yaml").exists()


@pytest.mark.parametrize(
    ("name", "text", "error", "said"),
    [
        ("Mine", '{"prompt": "x"}\n', SettingsError, "'Mine' cannot be a name"),
        ("../mine", '{"prompt": "x"}\n', SettingsError, "cannot be a name"),
        ("mine", None, SettingsError, "there is no such file"),
        ("mine", "", DataError, "none of its 0 rows is a prompt"),
        ("mine", 'oops\n{"text": 3}\n', DataError, r"none of its 2 rows is a prompt \(line 1: not valid JSON"),
        ("mine", '{"id": 1, "prompt": "x"}\n{"id": 1, "prompt": "y"}\n', DataError, "already stands for another"),
    ],
)
def test_what_cannot_be_a_domain_leaves_no_trace(folder, prompts, name, text, error, said):
    if text is None:
        prompts.unlink()
    else:
        prompts.write_text(text)
    with pytest.raises(error, match=said):
        add_domain(folder, name, prompts)
    assert not any(folder.iterdir())


def test_the_example_is_what_its_script_writes_and_fills_every_split(folder):
    rows = runpy.run_path(str(EXAMPLE / "sql.py"))["rows"]()
    text = (EXAMPLE / "sql.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == rows
    assert add_domain(folder, "sql", EXAMPLE / "sql.jsonl")
    reading = read_domain(read_domain_spec(folder, "sql"), folder)
    assert len(reading.prompts) == len({prompt.identity for prompt in reading.prompts}) == 240
    # The usual shares, and those of the small real build.
    for shares in (SplitShares(), SplitShares(train=0.70, dev=0.06, calibration=0.08, eval=0.16)):
        counts = Counter(assign_split(prompt, shares) for prompt in reading.prompts)
        assert min(counts[split] for split in SPLITS) >= 8 and counts["train"] > 150, counts
