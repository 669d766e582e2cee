"""Ten thousand malformed rows: no traceback, every one of them is kept or rejected, and what is kept is usable."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # malformed.py

from malformed import KINDS, malformed_rows

from dspark.config.models import DomainSpec
from dspark.corpus.prepare import prepare_prompts
from dspark.corpus.prompts import read_prompt_lines, read_prompts
from dspark.corpus.splits import SPLITS

COUNT = 10_000


@pytest.fixture(scope="module")
def rows():
    return malformed_rows(COUNT, seed=20261201)


@pytest.fixture(scope="module")
def data(rows):
    return b"\n".join(row.line for row in rows) + b"\n"


def test_every_malformed_row_is_kept_or_rejected_as_it_must_be(rows, data):
    """The expectation was written down where a row was made, from what was done to it."""
    reading = read_prompt_lines(data, source="fuzz.jsonl", domain="d")
    kept = [prompt.line for prompt in reading.prompts]
    rejected = [row.line for row in reading.rejections]
    assert reading.blank_lines == 0
    assert sorted(kept + rejected) == list(range(1, COUNT + 1))
    found = {**dict.fromkeys(kept, "kept"), **dict.fromkeys(rejected, "rejected")}
    wrong = {
        (row.kind, row.line[:120], found[number])
        for number, row in enumerate(rows, start=1)
        if row.expected not in ("either", found[number])
    }
    assert wrong == set()
    # Every kind was there by the hundred, and enough on either side.
    assert min(Counter(row.kind for row in rows if row.kind in KINDS).values()) > 500
    assert len(kept) > 1500 and len(rejected) > 5000
    for row in reading.rejections:
        assert row.category and len(row.reason) < 300 and row.reason.isprintable(), row.reason
    for prompt in reading.prompts:
        assert prompt.messages[-1].role == "user"
        for message in prompt.messages:
            assert message.content.strip() and "\0" not in message.content
            message.content.encode("utf-8")


def test_the_stage_counts_every_malformed_row(data, encoder, make_settings, tmp_path):
    (tmp_path / "fuzz.jsonl").write_bytes(data)
    spec = DomainSpec.model_validate({"name": "fuzz", "source": {"kind": "jsonl", "path": "fuzz.jsonl"}})
    summary = prepare_prompts(make_settings("fuzz"), [spec], tmp_path, encoder, tmp_path / "out")
    assert summary.input == summary.kept + summary.rejected == COUNT
    rejected = [json.loads(line) for line in (tmp_path / "out/rejected.jsonl").read_bytes().splitlines()]
    assert len(rejected) == len({row["line"] for row in rejected}) == summary.rejected
    kept = [row for split in SPLITS for row in read_prompts(tmp_path / "out" / f"{split}.jsonl")]
    assert len(kept) == len({row.id for row in kept}) == summary.kept
    # What spells a control token of the target never gets as far as a prompt.
    assert not [
        row
        for row in kept
        for token in ("<|im_start|>", "<|im_end|>", "<think>")
        if token in row.messages[-1]["content"]
    ]
    assert summary.domains["fuzz"].rejected_by_reason.keys() >= {
        "control-token",
        "too-long",
        "encoding",
        "json",
        "role",
    }
