"""`dspark plan --what-if`: what a package would do with shorter blocks, on another profile, at another load.

The answer is a prediction (`evaluation.prediction`) from what the package holds: records of single prompts, calibrated
temperatures, step times of its serving profiles. What these say nothing about is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from dspark.config.declared import suggestion
from dspark.config.models import Name
from dspark.decoding.policies import Fixed, NoDrafts, Policy, Scheduled, ScheduledDelayed
from dspark.decoding.records import RecordSet, read_records
from dspark.errors import DataError, IntegrityError, SettingsError
from dspark.evaluation.entry import CertificateEntry
from dspark.evaluation.prediction import Prediction, Recorded, predict
from dspark.evaluation.results import Model
from dspark.io.jsonfile import read_model
from dspark.measured import Measured
from dspark.package.change import Change
from dspark.package.evidence import certificate_of, listed_file
from dspark.package.layout import SCHEDULER
from dspark.package.manifest import Manifest
from dspark.package.verify import read_manifest
from dspark.profiling.cost import CostReport
from dspark.profiling.times import MeasuredSteps
from dspark.scheduling.config import read_scheduler
from dspark.scheduling.delayed import DelayedPrefixScheduler

_SCHEDULERS = ("reference", "sglang")  # engines that run the prefix scheduler
_TEMPERATURE = 0.0  # of the records: what certificates are measured at
_TOKENS = 48  # of an answer at most
_PACKED = (
    "blocks of which different lengths are verified in one step are taken to be packed where padding to the longest "
    "would waste much; an engine that always pads is slower"
)


class Setting(Model):
    """What a prediction is for."""

    profile: Name
    gamma: int = Field(ge=1)


class WhatIfPoint(Model):
    """One policy at one number of requests."""

    concurrency: int
    policy: str
    current: Prediction | None = None  # None: there are no step times of so many requests, or none of the policy
    changed: Prediction | None = None
    certified_tokens_per_second: Measured | None = None  # of the current setting, prefills included; None: not measured


class WhatIf(Model):
    """The answer."""

    schema_: Literal["dspark/what-if/1"] = Field(default="dspark/what-if/1", alias="schema")
    package_digest: str
    build: Name
    current: Setting
    changed: Setting
    points: tuple[WhatIfPoint, ...]
    rests_on: tuple[str, ...]  # in plain words


def what_if(folder: Path, change: Change) -> WhatIf:
    """Predict what a change does to a package.

    Raises:
        SettingsError: longer blocks than the drafter's, a profile that the package was not made for, more or fewer
            requests than were measured.
        DataError: step times or records are missing.
        IntegrityError: it is no package, or a file is not the one of its manifest.
    """
    manifest = read_manifest(folder)
    trained = manifest.drafter.gamma
    if change.gamma is not None and change.gamma > trained:
        raise SettingsError(
            f"gamma={change.gamma}: the drafter was trained for blocks of {trained}, and nothing tells how far longer "
            "ones would be accepted",
            f"train it: dspark evaluate --study length --build {manifest.build}, "
            f"or dspark run --build {manifest.build} --set drafter.gamma={change.gamma}",
        )
    profiles = _profiles(folder, manifest)
    if not profiles:
        raise DataError(
            f"{folder} holds no step times: none of its serving profiles was measured",
            f"measure one that can be reached: dspark profiles list, then dspark run --build {manifest.build}",
        )
    first = next(iter(profiles))
    current = Setting(profile=first, gamma=trained)
    changed = Setting(profile=_known(change.profile, profiles, manifest) or first, gamma=change.gamma or trained)
    recorded, records = _records(folder, manifest)
    mine, theirs = _Engine.of(folder, manifest, current, profiles), _Engine.of(folder, manifest, changed, profiles)
    entries = {entry.profile: entry for entry in certificate_of(folder, manifest).entries}
    loads = (change.concurrency,) if change.concurrency is not None else theirs.loads
    if change.concurrency is not None and not theirs.reaches(change.concurrency):
        known = f"{theirs.steps.least_requests} to {theirs.steps.most_requests} requests"
        raise SettingsError(
            f"concurrency={change.concurrency}: steps of {changed.profile} were measured for {known}",
            f"add {change.concurrency} to `requests` in serving_profiles/{changed.profile}.yaml: "
            f"dspark run --build {manifest.build}",
        )
    return WhatIf(
        package_digest=manifest.digests.package_digest,
        build=manifest.build,
        current=current,
        changed=changed,
        points=tuple(
            WhatIfPoint(
                concurrency=load,
                policy=policy,
                current=mine.predict(recorded, policy, load),
                changed=theirs.predict(recorded, policy, load),
                certified_tokens_per_second=_certified(entries.get(first), policy, load),
            )
            for load in loads
            for policy in dict.fromkeys((*mine.policies, *theirs.policies))
            if mine.knows(policy, load) or theirs.knows(policy, load)
        ),
        rests_on=(
            *_grounds(manifest, records, current, changed, profiles, entries),
            *([_PACKED] if mine.scheduled or theirs.scheduled else []),
        ),
    )


@dataclass(frozen=True)
class _Engine:
    """A setting, ready to be predicted."""

    gamma: int
    policies: dict[str, Policy]
    steps: MeasuredSteps
    loads: tuple[int, ...]

    @classmethod
    def of(cls, folder: Path, manifest: Manifest, setting: Setting, costs: dict[str, CostReport]) -> _Engine:
        cost = costs[setting.profile]
        policies: dict[str, Policy] = {NoDrafts.name: NoDrafts()} if cost.plain else {}
        policies[Fixed().name] = Fixed()
        scheduled = _scheduled(folder, manifest, setting) if schedules(cost) else None
        if scheduled is not None:
            policies[scheduled.name] = scheduled
        loads = {row.requests for row in cost.rows}
        if cost.plain:
            loads &= {row.requests for row in cost.plain}
        return cls(setting.gamma, policies, MeasuredSteps(cost), tuple(sorted(loads)))

    @property
    def scheduled(self) -> bool:
        """Whether a policy chooses how much is verified."""
        return not {NoDrafts.name, Fixed().name} >= set(self.policies)

    def reaches(self, concurrency: int) -> bool:
        """Whether so many requests are within those whose steps were measured."""
        return self.steps.least_requests <= concurrency <= self.steps.most_requests

    def knows(self, policy: str, concurrency: int) -> bool:
        """Whether the policy can be had, and steps tell what so many requests cost."""
        return policy in self.policies and self.reaches(concurrency)

    def predict(self, recorded: Recorded, policy: str, concurrency: int) -> Prediction | None:
        if not self.knows(policy, concurrency):
            return None
        return predict(recorded.cut(self.gamma), self.policies[policy], concurrency, self.steps)


def _profiles(folder: Path, manifest: Manifest) -> dict[str, CostReport]:
    """Step times by serving profile, in the build's order."""
    found = {}
    for name in manifest.inputs.recipe["serving_profiles"]:
        path = listed_file(folder, manifest, f"scheduler/cost/{name}.json")
        if path is not None:
            found[name] = read_model(path, CostReport, IntegrityError)
    return found


def _known(name: str | None, costs: dict[str, CostReport], manifest: Manifest) -> str | None:
    if name is None or name in costs:
        return name
    declared = manifest.inputs.recipe["serving_profiles"]
    if name in declared:
        raise SettingsError(
            f"profile={name}: the package holds no step times of it", f"those with step times: {', '.join(costs)}"
        )
    raise SettingsError(f"profile={name}: the package was not made for it", suggestion(name, costs))


def _records(folder: Path, manifest: Manifest) -> tuple[Recorded, RecordSet]:
    """Of the prompts of the domains that were trained on."""
    path = listed_file(folder, manifest, f"evidence/evaluate/records/temperature-{_TEMPERATURE:g}.safetensors")
    if path is None:
        raise DataError(f"{folder} holds no records of single prompts", f"dspark run --build {manifest.build}")
    records = read_records(path)
    trained = [i for i, domain in enumerate(records.domains) if domain in manifest.inputs.corpus.domains]
    chosen = records.only(trained)
    longest = max((len(one.token_ids) for one in chosen.decoded), default=_TOKENS)
    return Recorded.of(chosen.decoded, min(_TOKENS, longest)), chosen


def schedules(cost: CostReport) -> bool:
    """Whether the engine whose steps were measured chooses by survival and cost how much it verifies.

    llama.cpp verifies fixed lengths or goes by a threshold.
    """
    return cost.fingerprint.get("engine") in _SCHEDULERS


def _scheduled(folder: Path, manifest: Manifest, setting: Setting) -> Policy | None:
    """The package's own scheduler, budgets and gain included, for blocks of a setting."""
    path = listed_file(folder, manifest, SCHEDULER)
    if path is None:
        return None
    try:
        scheduler = read_scheduler(path).cut(setting.gamma).scheduler(setting.profile, _TEMPERATURE)
    except SettingsError:
        return None  # no confidence head, none calibrated for greedy decoding, or no cost: nothing is scheduled
    return ScheduledDelayed(scheduler) if isinstance(scheduler, DelayedPrefixScheduler) else Scheduled(scheduler)


def _certified(entry: CertificateEntry | None, policy: str, concurrency: int) -> Measured | None:
    points = entry.load if entry is not None else ()
    return next(
        (one.tokens_per_second for one in points if (one.concurrency, one.policy) == (concurrency, policy)), None
    )


def _grounds(
    manifest: Manifest,
    records: RecordSet,
    current: Setting,
    changed: Setting,
    costs: dict[str, CostReport],
    entries: dict[str, CertificateEntry],
) -> Sequence[str]:
    """What the answer rests on, and what it leaves out."""
    trained, domains = manifest.drafter.gamma, ", ".join(sorted(set(records.domains)))
    lines = [
        f"acceptance and confidences: {len(records.ids)} eval prompts ({domains}), greedy, whole blocks of {trained}"
    ]
    for name in dict.fromkeys((current.profile, changed.profile)):
        cost, entry = costs[name], entries.get(name)
        contexts = sorted({row.context for row in cost.rows})
        lines.append(
            f"step times of {name}: {cost.repeats} repeats of each shape, contexts of {contexts[0]} to {contexts[-1]} "
            f"tokens, {cost.dtype}, {cost.threads} threads"
        )
        if not cost.plain:
            why = cost.absent.get("plain", "the profile has no such steps")
            lines.append(f"plain decoding was not measured on {name}, and is not predicted: {why}")
        if not schedules(cost):
            lines.append(f"nothing is scheduled on {name}: {cost.fingerprint.get('engine')} has no scheduler")
        if entry is not None:
            told = f"measured {entry.measured_at}" if entry.status == "measured" else f"{entry.status}: {entry.reason}"
            lines.append(f"certificate of {name}: {told}")
    if changed.gamma < trained:
        lines.append(
            f"blocks of {changed.gamma} are the first {changed.gamma} of {trained} drafts and cost as much to draft: a "
            f"drafter of gamma {changed.gamma} drafts faster"
        )
    lengths = np.array([min(len(one.token_ids), _TOKENS) for one in records.decoded])
    lines.append(f"answers of {lengths.mean():.0f} tokens on average, {_TOKENS} at most; prefills are left out")
    return lines
