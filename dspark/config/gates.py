"""`pipeline/gates.yaml`: what a package must show before it is promoted (package.md, "Gates").

Every gate is a number, its unit and the reason for just that number. None may be left out: a gate that nobody wrote
down would be open.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from dspark.config.build import FOLDERS
from dspark.config.declared import Mistake, Mistakes, declared_names, read_mapping, suggestion, validated
from dspark.config.models import Digest, Name, Settings
from dspark.io.yamlfile import key_line

PATH = "pipeline/gates.yaml"

Reason = Annotated[str, StringConstraints(min_length=10, strip_whitespace=True)]


class LossGate(Settings):
    """At most so much worse: open if the whole 95 % interval of the relative difference lies above -number."""

    number: float = Field(ge=0, lt=1)
    unit: Literal["relative loss"]
    reason: Reason


class GainGate(Settings):
    """At least so much better: open if the interval lies above 0 and the difference itself reaches the number."""

    number: float = Field(ge=0)
    unit: Literal["relative gain"]
    reason: Reason


class DifferenceGate(Settings):
    """At most so far apart, in either direction."""

    number: float = Field(gt=0, lt=1)
    unit: Literal["relative difference"]
    reason: Reason


class ErrorGate(Settings):
    """At most this expected calibration error, of survival probabilities that run from 0 to 1."""

    number: float = Field(gt=0, le=1)
    unit: Literal["expected calibration error"]
    reason: Reason


class PromptsGate(Settings):
    """At least so many prompts behind an interval: of fewer, the bootstrap says less than it seems to."""

    number: int = Field(ge=2)
    unit: Literal["prompts"]
    reason: Reason


class DraftsGate(Settings):
    """At least so many verified drafts behind a check that passed."""

    number: int = Field(ge=1)
    unit: Literal["draft tokens"]
    reason: Reason


class DaysGate(Settings):
    """At least so many days before a certificate ends."""

    number: int = Field(ge=0)
    unit: Literal["days"]
    reason: Reason


class GatePolicy(Settings):
    """`pipeline/gates.yaml`."""

    tau: LossGate  # of every domain that the champion knows, and of those that nobody was trained on
    new_domain: GainGate  # tau of a domain that the champion was not trained on; without a champion: of every domain
    baseline: LossGate  # tau against the pinned baseline, so that small losses do not add up from champion to champion
    prompts: PromptsGate  # per domain and temperature, behind each of the three above
    ece: ErrorGate  # mean over the positions, after calibration, on the eval split, at each temperature
    lossless: DraftsGate  # of the evaluation's check and of each profile's
    agreement: DifferenceGate  # tau in the engine against tau in the evaluation
    throughput: LossGate  # tokens per second at the points of the service-level agreement
    fresh: DaysGate  # of the certificate's entry for each profile
    baselines: dict[Name, Digest] = Field(default_factory=dict)  # by build: the package_digest that is pinned


def read_gates(root: Path) -> GatePolicy:
    """The policy of a workspace.

    Raises:
        Mistakes: everything that is wrong with it, with lines.
        SettingsError: no such file, or not YAML.
    """
    path = root / PATH
    policy = validated(read_mapping(path, PATH), GatePolicy, path, PATH)
    builds = [name for word in ("build", "target") for name in declared_names(root / FOLDERS[word])]
    unknown = [name for name in policy.baselines if name not in builds]
    if unknown:
        # A misspelt build would go without a baseline and nobody would notice.
        mistakes = [
            Mistake(
                f"{PATH}:{key_line(path, 'baselines', name)}",
                f"baselines: build {name!r} does not exist",
                suggestion(name, builds),
            )
            for name in unknown
        ]
        raise Mistakes(mistakes)
    return policy
