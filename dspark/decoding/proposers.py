"""What drafts with a drafter of each kind, in torch, by `DrafterConfig.kind`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from dspark.config.models import DrafterKind
from dspark.decoding.chains import ChainProposer
from dspark.decoding.drafting import Proposer, TorchProposer
from dspark.drafters.base import Drafter
from dspark.drafters.kinds import require_dspark, require_eagle3


def _blocks(drafter: Drafter, precision: torch.dtype) -> Proposer:
    return TorchProposer(require_dspark(drafter, "drafting of blocks"), precision)


def _chains(drafter: Drafter, precision: torch.dtype) -> Proposer:
    return ChainProposer(require_eagle3(drafter, "drafting of chains"), precision)


PROPOSERS: Mapping[DrafterKind, Callable[[Drafter, torch.dtype], Proposer]] = {"dspark": _blocks, "eagle3": _chains}


def torch_proposer(drafter: Drafter, precision: torch.dtype = torch.float32) -> Proposer:
    """What drafts with a drafter, whatever its kind.

    Args:
        drafter: its dtype is the dtype of drafting.
        precision: of the distributions that tokens are drawn from.
    """
    return PROPOSERS[drafter.config.kind](drafter, precision)
