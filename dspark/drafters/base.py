"""What every kind of drafter is: trained weights on a frozen target's embedding and LM head.

A kind (`DrafterConfig.kind`) has a network (here, `kinds.py`), a way of training it (`training.methods`) and a way of
drafting with it (`decoding.proposers`). Corpus, taps, trainer, checkpoints, decoding and evaluation know no kinds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark.drafters.backbone import Rotary
from dspark.drafters.config import DrafterConfig
from dspark.errors import SettingsError
from dspark.targets.capping import soft_cap

INITIAL_STD = 0.02  # of every weight matrix, as in transformers' Qwen3


class Drafter(nn.Module):
    """A drafter on a frozen target's embedding and LM head. Its parameters are what is trained and stored.

    Args:
        config: the architecture.
        embedding: the target's input embedding, [V, d]; shared, not copied, never trained.
        head: the target's LM head, [V, d]; shared likewise (a reduced vocabulary gathers its rows).
        draft_token_ids: target ids that may be proposed, ascending int64 [Vd]; required iff the config has a
            `draft_vocab_size`.
    Raises:
        SettingsError: if a shape or the draft vocabulary does not fit the config.
    """

    embedding: Tensor
    head: Tensor
    draft_token_ids: Tensor
    rotary: Rotary  # every kind places its states by the target's RoPE

    def __init__(
        self, config: DrafterConfig, embedding: Tensor, head: Tensor, draft_token_ids: Tensor | None = None
    ) -> None:
        super().__init__()
        _check_shapes(config, embedding, head)
        self.config = config
        ids = _check_draft_ids(config, draft_token_ids)
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        rows = head.detach() if config.draft_vocab_size is None else head.detach()[ids.to(head.device)]
        self.register_buffer("head", rows, persistent=False)
        self.register_buffer("draft_token_ids", ids, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of the trained weights."""
        return next(self.parameters()).dtype

    def base_logits(self, hidden: Tensor) -> Tensor:
        """LM head on states [..., d], with the target's soft cap if it has one, float32 [..., Vd]."""
        return soft_cap(functional.linear(hidden, self.head.to(hidden.dtype)).float(), self.config.logit_cap)

    def to_target_ids(self, draft_index: Tensor) -> Tensor:
        """Target ids of columns of the draft logits."""
        return draft_index if self.config.draft_vocab_size is None else self.draft_token_ids[draft_index]


@torch.no_grad()
def randomise(drafter: Drafter, seed: int) -> None:
    """Random matrices, from the seed; biases 0; norms stay as they were made."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
        elif parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * INITIAL_STD)


def _check_shapes(config: DrafterConfig, embedding: Tensor, head: Tensor) -> None:
    for name, tensor in (("embedding", embedding), ("head", head)):
        if tuple(tensor.shape) != (config.vocab_size, config.hidden_size):
            raise SettingsError(
                f"the target's {name} is {list(tensor.shape)}, the drafter expects "
                f"[{config.vocab_size}, {config.hidden_size}]",
                "the drafter belongs to another target",
            )


def _check_draft_ids(config: DrafterConfig, ids: Tensor | None) -> Tensor:
    if config.draft_vocab_size is None:
        if ids is not None:
            raise SettingsError("draft_token_ids were given, but the drafter has the whole vocabulary")
        return torch.empty(0, dtype=torch.int64)
    if ids is None or ids.dtype != torch.int64 or tuple(ids.shape) != (config.draft_vocab_size,):
        raise SettingsError(f"draft_token_ids must be int64 [{config.draft_vocab_size}]")
    if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
        raise SettingsError(f"draft_token_ids must be ascending, different and in [0, {config.vocab_size})")
    return ids
