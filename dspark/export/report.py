"""`parity.json`: what was compared, on how much, how close it came. No torch import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dspark.engines.agreement import EngineAgreement
from dspark.errors import GateError

CONFIDENCE_TOLERANCE = 1e-4  # of confidence logits
LOGIT_TOLERANCE = 1e-3  # of draft logits
TIE = 1e-4  # a lead so small that the order of summation may decide it


class Part(BaseModel):
    """Base of the report's parts."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)


class Comparison(Part):
    """One dialect against the reference, or one faulty drafter against it.

    `near_ties` counts blocks in which the reference's own lead was below `tie_margin` where the drafts part; they are
    compared up to there and are no difference.
    """

    compared: tuple[str, ...]
    reference: str
    blocks: int
    tokens: int
    differing_blocks: int
    near_ties: int
    tie_margin: float = TIE
    max_confidence_difference: float
    confidence_tolerance: float = CONFIDENCE_TOLERANCE
    max_logit_difference: float | None = None
    logit_tolerance: float | None = None
    verdict: Literal["equal", "different"]
    first_difference: str | None = None


class Probes(Part):
    """The blocks that everything was compared on."""

    blocks: int
    shortest_context: int
    longest_context: int


class ParityReport(Part):
    """`parity.json`."""

    schema_: Literal["dspark/parity/1"] = Field(default="dspark/parity/1", alias="schema")
    probes: Probes
    dialects: dict[str, Comparison]
    negative_controls: dict[str, Comparison]  # each must be "different"
    absent: dict[str, str] = Field(default_factory=dict)  # dialects that could not be written, and why

    def why_absent(self, dialect: str) -> str:
        """Why a dialect was not written: it could not be, or its setting is off."""
        return self.absent.get(dialect, f"the build's setting export.{dialect} is off")


def judge_controls(controls: Mapping[str, Comparison] | Mapping[str, EngineAgreement], where: str) -> None:
    """Refuse a comparison that lets a faulty drafter pass: it could not tell.

    Raises:
        GateError: names the fault.
    """
    for name, control in controls.items():
        if control.verdict != "different":
            raise GateError(
                f"{where}: a drafter with the fault '{name}' passes the comparison on {control.blocks} blocks: "
                "an export with it would pass too",
                "train longer, or compare on more prompts",
            )
