"""An engine's drafts and counters against torch's: what was compared and what came out. No torch import."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dspark.engines.onnx_io import Part


class Count(Part):
    """One counter of an engine and what the sequential loop in torch makes of it."""

    engine: int
    torch: int

    @property
    def equal(self) -> bool:
        """True if they are the same."""
        return self.engine == self.torch


class EngineAgreement(Part):
    """An engine's drafts and counters against torch's.

    `blocks` counts the positions at which either side drafted; a block that only one of them drafted differs.
    """

    compared: tuple[str, ...] = ("draft_ids", "reply_ids", "counters")
    blocks: int
    tokens: int  # of the blocks that torch drafted
    differing_blocks: int
    differing_replies: int
    counts: dict[str, Count]
    verdict: Literal["equal", "different"]
    first_difference: str | None = None


class Setting(Part):
    """What was run in the engine: greedy, one request at a time, target, drafter, keys and values in float32."""

    prompts: int
    max_new_tokens: int
    n_max: int
    precision: Literal["F32"] = "F32"


class AgreementReport(Part):
    """What the export gate of llama.cpp found."""

    schema_: Literal["dspark/agreement/1"] = Field(default="dspark/agreement/1", alias="schema")
    engine: str
    reference: str = "the trained drafter in torch, float32, in the sequential loop"
    setting: Setting
    agreement: EngineAgreement
    negative_controls: dict[str, EngineAgreement]  # each must be "different"
