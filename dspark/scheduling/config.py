"""`scheduler/scheduler.json`: everything that a scheduler needs at run time, in one file with one reader and writer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from dspark.errors import CostCurveError, DataError, SettingsError
from dspark.io.jsonfile import read_model, write_model
from dspark.scheduling.additive import AdditiveCost
from dspark.scheduling.cost import CostCurve, StepCost
from dspark.scheduling.delayed import DelayedPrefixScheduler
from dspark.scheduling.prefix import PrefixScheduler

CostModel = Literal["curve", "additive"]
Label = Literal["greedy_match", "sampled"]
Policy = Annotated[
    str,
    StringConstraints(
        pattern=r"^(none|fixed\([1-9][0-9]*\)|threshold\((0|1|0?\.[0-9]+)\)|scheduled|scheduled-delayed)$"
    ),
]


class CalibrationKey(BaseModel):
    """Under which sampling confidences were recorded: results of different keys are never mixed (package.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    temperature: float = Field(ge=0)  # of the target; 0 is greedy
    top_k: int = Field(default=0, ge=0)  # 0: no limit
    top_p: float = Field(default=1.0, gt=0, le=1)
    rule: Literal["standard", "block"] = "standard"  # of verification
    # greedy_match: the draft token was the target's argmax; sampled: the acceptance rule accepted it.
    label: Label

    def __str__(self) -> str:
        return (
            f"temperature {self.temperature:g}, top_k {self.top_k}, top_p {self.top_p:g}, "
            f"rule {self.rule}, label {self.label}"
        )


class Temperatures(CalibrationKey):
    """The confidence temperatures of one key, one per draft position."""

    temperatures: tuple[Annotated[float, Field(gt=0)], ...]


class SchedulerConfig(BaseModel):
    """The canonical runtime configuration of a package (schema `dspark/scheduler/1`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)

    schema_: Literal["dspark/scheduler/1"] = Field(default="dspark/scheduler/1", alias="schema")
    gamma: int = Field(ge=1)
    calibrations: tuple[Temperatures, ...] = ()  # none: the drafter has no confidence head
    curves: dict[str, CostCurve]  # by serving profile
    additive: dict[str, AdditiveCost] = Field(default_factory=dict)  # likewise; files of before have none
    # Which of the two schedules, by serving profile; the curve where none is named.
    cost_models: dict[str, CostModel] = Field(default_factory=dict)
    policy: Policy = "scheduled"
    min_budget: int = Field(default=0, ge=0)  # draft tokens per step, all requests together
    max_budget: int | None = Field(default=None, ge=0)
    min_predicted_gain: float = Field(default=0.0, ge=0)  # relative, per further draft token per request

    @model_validator(mode="after")
    def _consistent(self) -> SchedulerConfig:
        for calibration in self.calibrations:
            if len(calibration.temperatures) != self.gamma:
                raise ValueError(
                    f"{len(calibration.temperatures)} temperatures for gamma {self.gamma} at {_key(calibration)}"
                )
        keys = [_key(calibration) for calibration in self.calibrations]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"two calibrations for {key}")
        for profile, model in self.cost_models.items():
            if profile not in (self.additive if model == "additive" else self.curves):
                raise ValueError(f"profile {profile} is to be scheduled by a cost that it does not have: {model}")
        if not self.calibrations and not self.policy.startswith(("none", "fixed")):
            raise ValueError(f"calibrations: there are none, and policy {self.policy} goes by them")
        if self.max_budget is not None and self.max_budget < self.min_budget:
            raise ValueError(f"max_budget {self.max_budget} is below min_budget {self.min_budget}")
        return self

    def calibration(
        self,
        temperature: float,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        rule: Literal["standard", "block"] = "standard",
        label: Label | None = None,
    ) -> Temperatures:
        """The calibration made under exactly this sampling.

        Args:
            label: None: the label that fits the traffic (`greedy_match` at temperature 0, else `sampled`).
        Raises:
            SettingsError: if there is none; lists those that there are. Borrowing one of another sampling is the
                caller's decision, never silent.
        """
        wanted = CalibrationKey(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            rule=rule,
            label=label or ("sampled" if temperature > 0 else "greedy_match"),
        )
        for calibration in self.calibrations:
            if _key(calibration) == wanted:
                return calibration
        known = "; ".join(str(_key(calibration)) for calibration in self.calibrations) or "none"
        raise SettingsError(f"no calibration for {wanted}", f"there are: {known}")

    def curve(self, profile: str) -> CostCurve:
        """The cost curve of a serving profile.

        Raises:
            SettingsError: if the profile was not measured; lists those that were.
        """
        if profile not in self.curves:
            known = ", ".join(sorted(self.curves)) or "none"
            raise SettingsError(f"no cost curve for serving profile '{profile}'", f"there are: {known}")
        return self.curves[profile]

    def cost(self, profile: str) -> StepCost:
        """The cost that schedules a serving profile: `cost_models` names which of the two.

        Raises:
            SettingsError: as `curve`.
        """
        return self.additive[profile] if self.cost_models.get(profile) == "additive" else self.curve(profile)

    def cut(self, gamma: int) -> SchedulerConfig:
        """The same for the first `gamma` drafts of every block, which keep their temperatures.

        Raises:
            SettingsError: blocks are shorter than that.
        """
        if not 1 <= gamma <= self.gamma:
            raise SettingsError(f"blocks of {self.gamma} drafts cannot be cut to {gamma}")
        calibrations = tuple(
            one.model_copy(update={"temperatures": one.temperatures[:gamma]}) for one in self.calibrations
        )
        return self.model_copy(update={"gamma": gamma, "calibrations": calibrations})

    def scheduler(self, profile: str, temperature: float) -> PrefixScheduler:
        """A scheduler for one serving profile and one target temperature, delayed if the policy says so.

        Raises:
            SettingsError: as `cost` and `calibration`.
        """
        kind = DelayedPrefixScheduler if self.policy == "scheduled-delayed" else PrefixScheduler
        return kind(
            self.cost(profile),
            self.gamma,
            self.calibration(temperature).temperatures,
            min_budget=self.min_budget,
            max_budget=self.max_budget,
            min_predicted_gain=self.min_predicted_gain,
        )


def read_scheduler(path: Path) -> SchedulerConfig:
    """Read `scheduler.json`.

    Raises:
        DataError: missing, not JSON, another schema, or fields that do not validate.
        CostCurveError: a curve that no scheduler can use; names the file.
    """
    try:
        return read_model(path, SchedulerConfig, DataError)
    except CostCurveError as reason:
        raise CostCurveError(f"{path}: {reason.message}", reason.hint) from None


def write_scheduler(path: Path, config: SchedulerConfig) -> None:
    """Write `scheduler.json` atomically."""
    write_model(path, config)


def _key(calibration: CalibrationKey) -> CalibrationKey:
    return CalibrationKey(**calibration.model_dump(include=set(CalibrationKey.model_fields)))
