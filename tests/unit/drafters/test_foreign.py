"""Checkpoints that others wrote, in each of their layouts: loaded exactly, or refused by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # foreign_layouts.py

from foreign_layouts import LAYOUTS, flat, speculators, write

from dspark.drafters.checkpoint import write_union
from dspark.drafters.dialects import foreign_config
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.foreign import load_drafter
from dspark.errors import DataError, IntegrityError
from dspark.evaluation.tiny import tiny_drafter, tiny_target

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    target = tiny_target(24, spread=0.4, seed=3)
    return target, tiny_drafter(target, 4, seed=1)


def load(folder: Path, target: Any) -> Any:
    return load_drafter(folder, target.record, target.embedding, target.head)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_drafter(pair: tuple[Any, Any], tmp_path: Path, layout: str) -> None:
    target, drafter = pair
    loaded = load(write(tmp_path / "d", LAYOUTS[layout](drafter), drafter.state_dict()), target)
    assert loaded.config == drafter.config
    assert all(torch.equal(value, drafter.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_prefixes_and_the_targets_own_matrices_are_passed_over(pair: tuple[Any, Any], tmp_path: Path) -> None:
    target, drafter = pair
    tensors = {f"model.{name}" if name.startswith("layers.") else name: t for name, t in drafter.state_dict().items()}
    tensors |= {"embed_tokens.weight": torch.zeros(24, 32), "lm_head.weight": torch.zeros(24, 32)}
    loaded = load(write(tmp_path / "d", flat(drafter), tensors), target)
    assert torch.equal(loaded.head, target.head) and torch.equal(loaded.embedding, target.embedding)


def test_a_drafter_without_a_confidence_head_states_no_confidence(pair: tuple[Any, Any], tmp_path: Path) -> None:
    target, drafter = pair
    tensors = {name: t for name, t in drafter.state_dict().items() if not name.startswith("confidence_head")}
    loaded = load(write(tmp_path / "d", flat(drafter), tensors), target)
    assert loaded.confidence_logits(torch.randn(2, 32), torch.tensor([3, 4])) is None
    assert loaded.config == drafter.config.model_copy(update={"confidence": False})


def test_deepspec_s_dflash_is_read_without_heads(tmp_path: Path) -> None:
    """deepspec.md, 4.2: rank 0, no type; a layout without any rank is z-lab's, whose first slot drafts nothing."""
    target = tiny_target(24, spread=0.4, seed=3)
    drafter = tiny_drafter(target, 4, markov="none")
    value = {key: inner for key, inner in flat(drafter).items() if key not in ("markov_head_type",)}
    value["enable_confidence_head"] = False
    loaded = load(write(tmp_path / "d", value, drafter.state_dict()), target)
    assert loaded.config == drafter.config
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    del value["markov_rank"]
    with pytest.raises(DataError, match="'markov_rank' is missing"):
        load(write(tmp_path / "z", value, drafter.state_dict()), target)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_the_other_heads_are_read_as_well(pair: tuple[Any, Any], tmp_path: Path, kind: str) -> None:
    target, drafter = pair
    config = drafter.config.model_copy(update={"markov_type": kind})
    made = DSparkDrafter(config, target.embedding, target.head, seed=4)
    loaded = load(write(tmp_path / "d", flat(made) | {"markov_head_type": kind}, made.state_dict()), target)
    assert loaded.config == config
    assert all(torch.equal(value, made.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_a_reduced_vocabulary_is_read_with_its_ids(pair: tuple[Any, Any], tmp_path: Path) -> None:
    """speculators': the head's rows stored, and target ids as offsets."""
    target, _ = pair
    ids = torch.tensor([1, 4, 5, 11, 23])
    made = tiny_drafter(target, 4, draft_token_ids=tuple(ids.tolist()), seed=1)
    value = speculators(made) | {"draft_vocab_size": 5}
    tensors = made.state_dict() | {"lm_head.weight": target.head[ids], "d2t": ids - torch.arange(5)}
    loaded = load(write(tmp_path / "d", value, tensors), target)
    assert torch.equal(loaded.draft_token_ids, ids) and torch.equal(loaded.head, target.head[ids])
    for number, (change, message) in enumerate(
        [
            ({"d2t": ids + 1}, "leads outside the vocabulary of 24"),
            ({"d2t": ids[:3]}, "needs d2t and lm_head.weight"),
            ({"lm_head.weight": target.head[:5]}, "not made of the target's rows"),
        ]
    ):
        with pytest.raises(DataError, match=message):
            load(write(tmp_path / str(number), value, tensors | change), target)


def test_one_of_our_own_is_checked_to_the_byte(pair: tuple[Any, Any], tmp_path: Path) -> None:
    target, drafter = pair
    write_union(tmp_path / "d", drafter, target.record, dtype="float32", untrained=True)
    assert load(tmp_path / "d", target).config == drafter.config
    with (tmp_path / "d" / "model.safetensors").open("ab") as handle:
        handle.write(b"x")
    with pytest.raises(IntegrityError, match="not the weights"):
        load(tmp_path / "d", target)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("deepspec", {"sample_from_anchor": False}, "sample_from_anchor is false"),
        ("speculators", {"sample_from_anchor": None}, "sample_from_anchor is false or left out"),
        ("deepspec", {"markov_head_type": "lstm"}, "markov_type"),
        ("deepspec", {"is_causal": True}, "attend causally"),
        ("deepspec", {"layer_types": ["sliding_attention"]}, "through a window"),
        ("deepspec", {"draft_vocab_size": 30}, "draft_vocab_size must be smaller"),
        ("deepspec", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("deepspec", {"block_size": None}, "'block_size' is missing"),
        ("deepspec", {"mask_token_id": 24}, "mask_token_id 24 is outside"),
        ("deepspec", {"target_layer_ids": [0, 2]}, "tap 2 is the last"),
        ("deepspec", {"vocab_size": 30}, "its vocabulary is 30, that of target tiny is 24"),
        ("deepspec", {"hidden_size": 64}, "its hidden size is 64, that of target tiny is 32"),
    ],
)
def test_what_would_be_guessed_is_refused(
    pair: tuple[Any, Any], layout: str, change: dict[str, Any], message: str
) -> None:
    target, drafter = pair
    with pytest.raises(DataError, match=message):
        foreign_config(LAYOUTS[layout](drafter) | change, target.record, "config.json")
    with pytest.raises(DataError, match="not a JSON object"):
        foreign_config([], target.record, "config.json")


def test_tensors_that_do_not_fit_are_all_named(pair: tuple[Any, Any], tmp_path: Path) -> None:
    target, drafter = pair
    tensors = dict(drafter.state_dict())
    tensors["extra"] = torch.zeros(1)
    tensors["fc.weight"] = torch.full_like(tensors["fc.weight"], float("nan"))
    tensors["norm.weight"] = torch.zeros(5)
    del tensors["hidden_norm.weight"]
    with pytest.raises(DataError) as caught:
        load(write(tmp_path / "d", flat(drafter), tensors), target)
    for text in (
        "hidden_norm.weight is missing",
        "extra is unexpected",
        "norm.weight is [5]",
        "fc.weight is not finite",
    ):
        assert text in caught.value.message
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps(flat(drafter)))
    with pytest.raises(DataError, match=r"no \.safetensors files"):
        load(tmp_path / "empty", target)
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(DataError, match="not a safetensors file"):
        load(tmp_path / "empty", target)
