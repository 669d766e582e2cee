"""The network of every kind of drafter, by `DrafterConfig.kind`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from dspark.config.models import DrafterKind
from dspark.drafters.base import Drafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.eagle3 import Eagle3Drafter
from dspark.errors import SettingsError


class Network(Protocol):
    """What makes an untrained drafter of a kind, see `Drafter`."""

    def __call__(
        self,
        config: DrafterConfig,
        embedding: Tensor,
        head: Tensor,
        draft_token_ids: Tensor | None = None,
        *,
        seed: int = 0,
    ) -> Drafter:
        """A drafter whose weights are random, from the seed."""
        ...


NETWORKS: Mapping[DrafterKind, Network] = {"dspark": DSparkDrafter, "eagle3": Eagle3Drafter}


def build_drafter(
    config: DrafterConfig, embedding: Tensor, head: Tensor, draft_token_ids: Tensor | None = None, *, seed: int = 0
) -> Drafter:
    """An untrained drafter of the kind that the config names, see `Drafter`."""
    return NETWORKS[config.kind](config, embedding, head, draft_token_ids, seed=seed)


def require_dspark(drafter: Drafter, what: str) -> DSparkDrafter:
    """The drafter as one of the kind that drafts blocks in one pass (DSpark, DFlash), for what knows only those.

    Args:
        what: needs it, for the message.
    Raises:
        SettingsError: it is of another kind.
    """
    if not isinstance(drafter, DSparkDrafter):
        raise SettingsError(f"{what} works on drafters of kind dspark, this one is of kind {drafter.config.kind}")
    return drafter


def require_eagle3(drafter: Drafter, what: str) -> Eagle3Drafter:
    """The drafter as one of the kind that drafts token by token, for what knows only those; see `require_dspark`."""
    if not isinstance(drafter, Eagle3Drafter):
        raise SettingsError(f"{what} works on drafters of kind eagle3, this one is of kind {drafter.config.kind}")
    return drafter
