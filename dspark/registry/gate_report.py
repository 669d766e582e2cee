"""What the gates said of a package: one row each, written once and never re-judged (package.md, "Gates").

Models only, so that whoever shows, logs or compares reports needs nothing of what made them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dspark.config.models import Digest, Name
from dspark.measured import Measured

Verdict = Literal["non-inferior", "better", "worse", "undecided", "pass", "fail"]
Stage = Literal["staging", "production"]
Number = Measured | float | None

# A gate that asks for a gain never says `non-inferior`, so that a verdict alone tells whether its gate is open.
OPEN: frozenset[Verdict] = frozenset({"non-inferior", "better", "pass"})


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)


class GateRow(_Model):
    """One gate on one thing that it is about: a domain at a temperature, a profile at a load, the package."""

    gate: str = Field(min_length=1)  # `tau math, temperature 0`
    candidate: Number = None
    champion: Number = (
        None  # of a gate against the pinned baseline: the baseline's; without a champion: no speculation's
    )
    difference: Number = None  # relative, candidate / champion - 1
    verdict: Verdict
    # That would decide what is undecided, if any number would; of throughput: timed requests.
    prompts_needed: int | None = Field(default=None, gt=0)
    reason: str = Field(min_length=1)  # what was asked, and why it was not given where it was not

    @property
    def passed(self) -> bool:
        """True if the gate is open."""
        return self.verdict in OPEN


class GateReport(_Model):
    """`dspark/gates/1`."""

    schema_: Literal["dspark/gates/1"] = Field(default="dspark/gates/1", alias="schema")
    build: Name
    package_digest: Digest
    champion: Digest | None = None  # package_digest of whoever holds the stage; None: nobody does
    baseline: Digest | None = None  # package_digest that is pinned; None: none is
    stage: Stage
    rows: tuple[GateRow, ...] = Field(min_length=1)
    passed: bool  # all gates are open; stored for readers, and held against the rows

    @model_validator(mode="after")
    def _derived(self) -> GateReport:
        if self.passed != all(row.passed for row in self.rows):
            raise ValueError("passed is not what the rows come to")
        return self

    @classmethod
    def of(
        cls,
        rows: Iterable[GateRow],
        *,
        build: str,
        package_digest: str,
        champion: str | None,
        stage: Stage,
        baseline: str | None = None,
    ) -> GateReport:
        """The report of some rows, at least one."""
        found = tuple(rows)
        return cls(
            build=build,
            package_digest=package_digest,
            champion=champion,
            baseline=baseline,
            stage=stage,
            rows=found,
            passed=all(row.passed for row in found),
        )

    @property
    def refusals(self) -> tuple[GateRow, ...]:
        """The gates that are shut, in order."""
        return tuple(row for row in self.rows if not row.passed)
