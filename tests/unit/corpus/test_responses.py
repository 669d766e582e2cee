from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

import pytest
import torch

from dspark.config.models import ResponseSettings, Sampling, TargetSpec
from dspark.corpus import responses as module
from dspark.corpus.responses import ResponsesSummary, answer_prompts, generate_responses, plan_batches
from dspark.corpus.sequences import read_sequences
from dspark.errors import DataError, Interrupted
from dspark.io.jsonfile import read_model
from dspark.io.progress import Progress
from dspark.targets.loading import load_target
from dspark.targets.materialise import materialise

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 280,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
SETTINGS = ResponseSettings(max_new_tokens=14, batch_size=3, seed=5)


@dataclass
class Asked:
    """A prepared prompt, as far as this stage looks at it."""

    id: str
    domain: str
    token_ids: list[int] = field(default_factory=list)


def prompts(domain, count, shift=0):
    return [Asked(f"{domain}{n}", domain, [1, *range(10 + n + shift, 13 + 3 * n + shift)]) for n in range(count)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A random target that ends about every tenth token, so that rows finish at different times."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("workspace")
    spec = {"name": "tiny", "source": {"kind": "random", "config": CONFIG}, "dtype": "float32"}
    target = load_target(materialise(TargetSpec.model_validate(spec), root=root), root)
    target.eos_token_ids = frozenset(range(0, 280, 11))
    return target


class StopAfter(Progress):
    """Asks for a stop at the n-th safe point, and counts the tokens done."""

    def __init__(self, steps=None):
        self.steps, self.done, self.started = steps, 0, []

    def start(self, task, total, done=0, unit="steps"):
        self.started.append((total, done, unit))

    def advance(self, count=1, **fields):
        self.done += count
        if self.steps is not None:
            self.steps -= 1
            if self.steps == 0:
                raise Interrupted("stop")


@pytest.mark.parametrize("steps", [1, 15, 16, 30, 38])
def test_a_killed_run_goes_on_to_identical_tokens(target, tmp_path, steps):
    asked = prompts("math", 8) + prompts("chat", 4, shift=50)
    whole = generate_responses(target, asked, SETTINGS, tmp_path / "other")
    with pytest.raises(Interrupted):
        generate_responses(target, asked, SETTINGS, tmp_path / "store", StopAfter(steps))
    kept = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*.jsonl")}
    again = StopAfter()
    assert generate_responses(target, asked, SETTINGS, tmp_path / "store", again) == whole
    # Nothing that was complete is done twice, nothing else was kept.
    stored = sum(len(data.splitlines()) for data in kept.values())
    budget = SETTINGS.max_new_tokens
    assert again.started == [(12 * budget, stored * budget, "tokens")]
    assert again.done == (12 - stored) * budget
    assert {path: path.read_bytes() for path in kept} == kept


def test_a_stop_within_a_batch_throws_only_that_batch_away(target, tmp_path):
    asked = prompts("math", 9)
    with pytest.raises(Interrupted):
        generate_responses(target, asked, SETTINGS, tmp_path, StopAfter(steps=29))
    finished = [len(path.read_text().splitlines()) for path in tmp_path.rglob("*.jsonl")]
    assert finished
    assert set(finished) == {3}
    assert sum(finished) < 9


def test_every_prompt_is_answered_once_in_its_order(target, tmp_path):
    asked = prompts("math", 7) + prompts("chat", 5, shift=60)
    rows = generate_responses(target, asked, SETTINGS, tmp_path)
    assert [(row.id, row.sample) for row in rows] == [(prompt.id, 0) for prompt in asked]
    for row, prompt in zip(rows, asked, strict=True):
        assert row.prompt_ids == prompt.token_ids
        ends = [token % 11 == 0 for token in row.response_ids]
        assert not any(ends[:-1])
        assert row.finish_reason == ("stop" if ends[-1] else "length")
        assert len(row.response_ids) == 14 or ends[-1]


def test_samples_of_a_prompt_differ_and_are_counted(target, tmp_path):
    rows = generate_responses(target, prompts("math", 2), SETTINGS, tmp_path, samples=5)
    assert [(row.id, row.sample) for row in rows] == [(f"math{n}", sample) for n in (0, 1) for sample in range(5)]
    assert len({tuple(row.response_ids) for row in rows}) > 5


def test_a_domain_more_leaves_the_other_answers_as_they_are(target, tmp_path):
    math, chat = prompts("math", 7), prompts("chat", 5, shift=60)
    alone = generate_responses(target, math, SETTINGS, tmp_path)
    watched = StopAfter()
    both = generate_responses(target, chat + math, SETTINGS, tmp_path, watched)
    assert both[5:] == alone
    budget = SETTINGS.max_new_tokens
    assert watched.started == [(12 * budget, 7 * budget, "tokens")]
    # Nor do they hang on what is answered before them.
    assert generate_responses(target, chat + math, SETTINGS, tmp_path / "fresh") == both


def test_the_order_of_prompts_in_the_file_changes_no_answer(target, tmp_path):
    asked = prompts("math", 4) + [Asked(f"other{n}", "math", [1, 200 + n, 30, 40]) for n in range(3)]
    forward = generate_responses(target, asked, SETTINGS, tmp_path / "a")
    assert generate_responses(target, asked[::-1], SETTINGS, tmp_path / "b") == forward[::-1]


@pytest.mark.parametrize(
    "change", [{"seed": 6}, {"max_new_tokens": 13}, {"sampling": Sampling(temperature=0.5)}, {"batch_size": 2}]
)
def test_settings_that_change_tokens_change_the_place_in_the_store(target, tmp_path, change):
    asked = prompts("math", 3)
    generate_responses(target, asked, SETTINGS, tmp_path)
    generate_responses(target, asked, SETTINGS.model_copy(update=change), tmp_path)
    assert len(list(tmp_path.rglob("*.jsonl"))) == (3 if "batch_size" in change else 2)


def test_another_target_or_another_revision_shares_nothing(target, tmp_path, monkeypatch):
    asked = prompts("math", 3)
    generate_responses(target, asked, SETTINGS, tmp_path)
    monkeypatch.setattr(module, "REVISION", module.REVISION + 1)
    generate_responses(target, asked, SETTINGS, tmp_path)
    monkeypatch.setattr(target, "record", target.record.model_copy(update={"digest": "f" * 64}))
    generate_responses(target, asked, SETTINGS, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_the_targets_sampling_is_used_unless_another_is_set(target, tmp_path, monkeypatch):
    cold = target.record.model_copy(update={"sampling": Sampling(temperature=0)})
    monkeypatch.setattr(target, "record", cold)
    first, second = (
        generate_responses(target, prompts("math", 3), SETTINGS.model_copy(update={"seed": seed}), tmp_path)
        for seed in (1, 2)
    )
    assert first == second  # temperature 0 knows no seed


def test_batches_are_even_parts_of_a_domain_by_length():
    asked = prompts("b", 7)[::-1] + prompts("a", 2)
    batches = plan_batches(asked, 1, SETTINGS, Sampling())
    # Seven rows in batches of at most three make three parts of 2, 2 and 3, shortest first; domain a comes first.
    assert [[prompt.id for prompt, _ in batch.rows] for batch in batches] == [
        ["a0", "a1"],
        ["b0", "b1"],
        ["b2", "b3"],
        ["b4", "b5", "b6"],
    ]
    assert len({batch.digest for batch in batches}) == 4


def test_a_stored_batch_that_is_not_its_batch_is_answered_again(target, tmp_path):
    """Without its entry, as older versions left it, it is known by the prompts that it answers."""
    asked = prompts("math", 2)
    whole = generate_responses(target, asked, SETTINGS, tmp_path)
    (path,) = tmp_path.rglob("*.jsonl")
    good, entry = path.read_bytes(), path.with_suffix(".json")
    rows = [json.loads(line) for line in good.splitlines()]
    wrong = [rows[:1], [rows[0], rows[0]], [rows[0], rows[1] | {"prompt_ids": [1]}], [{**rows[0], "x": 1}]]
    damaged = ["".join(json.dumps(row) + "\n" for row in some).encode() for some in wrong]
    for data in (*damaged, b"{\n", b"", b"\xff\n", good[:-10]):
        for known in (True, False):
            path.write_bytes(data)
            if not known:
                entry.unlink()
            noted = Noted()
            assert generate_responses(target, asked, SETTINGS, tmp_path, noted) == whole
            assert path.read_bytes() == good and entry.is_file()
            assert len(noted.notes) == 1 and path.name in noted.notes[0] and "answered again" in noted.notes[0]


class Noted(Progress):
    """Keeps the notes."""

    def __init__(self):
        self.notes = []

    def note(self, message):
        self.notes.append(message)


def test_no_flipped_bit_of_an_answer_is_trained_on(target, tmp_path, monkeypatch):
    """One digit of a token id for another leaves sound JSON, sound prompts, and a wrong token."""
    asked = prompts("math", 2)
    whole = generate_responses(target, asked, SETTINGS, tmp_path)
    (path,) = tmp_path.rglob("*.jsonl")
    good, entry = path.read_bytes(), path.with_suffix(".json")
    place = good.index(b'"response_ids":[') + len(b'"response_ids":[')
    path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
    assert generate_responses(target, asked, SETTINGS, tmp_path) == whole
    entry.write_bytes(entry.read_bytes().replace(b'"sha256": "', b'"sha256": "0')[:-5])
    assert generate_responses(target, asked, SETTINGS, tmp_path) == whole
    # A kill between the batch and its entry costs nothing.
    entry.unlink()
    monkeypatch.setattr(target, "last_hidden", lambda *args, **options: pytest.fail("the target ran"))
    assert generate_responses(target, asked, SETTINGS, tmp_path) == whole


def test_a_prompt_that_leaves_no_room_is_a_data_error(target, tmp_path):
    with pytest.raises(DataError, match="has 64 tokens; the target takes 1 to 63"):
        generate_responses(target, [Asked("a", "math", [9] * 64)], SETTINGS, tmp_path)


def test_the_stage_writes_splits_and_a_summary_by_one_rename(target, tmp_path):
    settings = SETTINGS.model_copy(update={"samples_per_prompt": 2})
    splits = {"train": prompts("math", 4) + prompts("chat", 2, shift=40), "dev": prompts("math", 2, shift=80)}
    out = tmp_path / "responses"
    out.mkdir()
    (out / "old").write_text("of an earlier run")
    summary = answer_prompts(target, splits, settings, tmp_path / "store", out)
    assert sorted(path.name for path in out.iterdir()) == ["dev.jsonl", "summary.json", "train.jsonl"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    train, dev = (read_sequences(out / f"{split}.jsonl") for split in ("train", "dev"))
    # Train prompts are answered twice, dev prompts once.
    assert [row.id for row in train][:3] == ["math0#0", "math0#1", "math1#0"]
    assert (len(train), len(dev)) == (12, 2)
    counted = summary.splits["train"]["math"]
    assert counted.responses == 8
    assert counted.stopped == sum(row.finish_reason == "stop" for row in train if row.domain == "math")
    assert counted.prompt_tokens == sum(row.prompt_length for row in train if row.domain == "math")
    assert counted.response_tokens + counted.prompt_tokens == sum(
        len(row.token_ids) for row in train if row.domain == "math"
    )
    assert read_model(out / "summary.json", ResponsesSummary) == summary


def test_a_second_run_writes_the_same_bytes_without_the_target_running(target, tmp_path, monkeypatch):
    splits = {"train": prompts("math", 4), "dev": prompts("math", 2, shift=80)}
    answer_prompts(target, splits, SETTINGS, tmp_path / "store", tmp_path / "a")
    monkeypatch.setattr(target, "last_hidden", lambda *args, **options: pytest.fail("the target ran"))
    started = time.monotonic()
    answer_prompts(target, splits, SETTINGS, tmp_path / "store", tmp_path / "b")
    assert time.monotonic() - started < 5
    for name in ("train.jsonl", "dev.jsonl", "summary.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
