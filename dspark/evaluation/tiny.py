"""A tiny random target and drafter, small enough that everything they can say can be enumerated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dspark.config.models import DrafterSettings, MarkovSettings, MarkovType
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import DSparkDrafter
from dspark.targets.loading import Target
from dspark.targets.record import TargetRecord

_WIDTH, _LAYERS = 32, 3


def tiny_target(
    vocab: int,
    *,
    family: str = "llama",
    eos_token_ids: tuple[int, ...] = (1,),
    dtype: torch.dtype = torch.float32,
    spread: float = 0.12,
    max_position: int = 128,
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
) -> Target:
    """A target of three layers and width 32, without a tokenizer; token 0 is its mask token.

    Args:
        vocab: tokens.
        family: transformers' model type.
        spread: standard deviation of the weights; 0.12 makes distributions lively without making them certain.
        changes: of the transformers config, what is particular about the family.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {
        "vocab_size": vocab,
        "hidden_size": _WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": max_position,
        "initializer_range": spread,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = AutoConfig.for_model(family, **fields | dict(changes or {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    nothing = "0" * 64  # it is never written to disk
    record = TargetRecord(
        name="tiny",
        source={"kind": "random", "seed": seed},
        revision="0",
        digest=nothing,
        weights_digest=nothing,
        embedding_digest=nothing,
        head_digest=nothing,
        tokenizer_digest=nothing,
        chat_template_digest=nothing,
        dtype="float32",
        model_type=family,
        architecture=type(model).__name__,
        text_config=config.to_dict(),
        hidden_size=_WIDTH,
        num_layers=_LAYERS,
        vocab_logical=vocab,
        vocab_physical=vocab,
        max_position=max_position,
        taps=(0, 1),
        mask_token_id=0,
        eos_token_ids=eos_token_ids,
    )
    return Target(record, model, None)


def tiny_drafter(
    target: Target,
    gamma: int,
    *,
    draft_token_ids: Sequence[int] | None = None,
    spread: float = 8.0,
    markov: MarkovType = "vanilla",
    seed: int = 1,
) -> DSparkDrafter:
    """A drafter of one layer on `target`, in its dtype.

    Args:
        draft_token_ids: a reduced draft vocabulary, ascending; None: the whole one.
        spread: factor on the usual random weights; 8 makes proposals and confidences vary from token to token.
        markov: its sequential head; "none" leaves off the confidence head as well.
    """
    settings = DrafterSettings(
        gamma=gamma,
        layers=1,
        markov=MarkovSettings(type=markov, rank=4),
        confidence=markov != "none",
        draft_vocab_size=None if draft_token_ids is None else len(draft_token_ids),
    )
    ids = None if draft_token_ids is None else torch.tensor(draft_token_ids)
    config = DrafterConfig.of(target.record, settings)
    drafter = DSparkDrafter(config, target.embedding, target.head, ids, seed=seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.mul_(spread)
        drafter.markov_head.reset_constant_channel()
    return drafter.to(target.dtype)
