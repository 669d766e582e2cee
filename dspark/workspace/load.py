"""A load study: what a build does at numbers of requests, predicted, written down, and then measured.

The prediction rests on records that the evaluation made of some eval prompts and on step times; the prompts that are
asked are others. `predicted.json` is on disk before the first round.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.config.models import LoadSettings, Sampling
from dspark.config.stages import EvaluateInputs
from dspark.config.studies import Study
from dspark.decoding.records import RecordSet, read_records
from dspark.errors import DataError, SettingsError
from dspark.evaluation.load_report import LoadReport, PredictedLoad, load_report, predict_load
from dspark.evaluation.prediction import Recorded
from dspark.io.atomic import write_text
from dspark.io.jsonfile import read_json, read_model, write_model
from dspark.io.progress import Progress, install_stop_signals
from dspark.profiling.cost import CostReport
from dspark.profiling.times import MeasuredSteps
from dspark.report.load_study import load_texts
from dspark.scheduling.prefix import PrefixScheduler
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import ListenedProgress, Listener
from dspark.workspace.lock import run_lock
from dspark.workspace.served import (
    fitted_temperatures,
    impossible_policies,
    served_drafter,
    served_inputs,
    served_target,
)
from dspark.workspace.stage import StagePaths

if TYPE_CHECKING:
    from dspark.corpus.prompts import PreparedPrompt
    from dspark.drafters.base import Drafter
    from dspark.evaluation.rounds import Arm
    from dspark.targets.loading import Target

REPORT, PREDICTED, COST = "study.json", "predicted.json", "cost.json"


def load_study(
    workspace: Workspace, found: Study, folder: Path, listener: Listener
) -> tuple[LoadReport, tuple[str, ...]]:
    """Predict and measure the load of an evaluated build on its first serving profile.

    Args:
        found: a study that sweeps the load.
        folder: for the results.
    Returns:
        the report, and the files in the folder.
    Raises:
        SettingsError: a policy or a length that this drafter cannot have, a sampling that was not evaluated.
        DataError: too few prompts.
    """
    build, settings = found.pipeline.chosen.name, found.spec.load or LoadSettings()
    inputs, paths = served_inputs(workspace, build, folder)
    install_stop_signals()
    progress = ListenedProgress(listener, f"{found.spec.name}@{build}")
    started = time.monotonic()
    with run_lock(workspace, f"dspark evaluate --study {found.spec.name} of build {build!r}", listener.note):
        report = _Load(workspace, inputs, paths, settings, progress).study(found.spec.name, folder)
        write_model(folder / REPORT, report)
        texts = load_texts(report)
        for name, text in texts.items():
            write_text(folder / name, text)
    progress.end(time.monotonic() - started)
    return report, (REPORT, PREDICTED, COST, *texts)


@dataclass(frozen=True)
class _Load:
    """One build, loaded once."""

    workspace: Workspace
    inputs: EvaluateInputs
    paths: StagePaths
    settings: LoadSettings
    progress: Progress

    def study(self, name: str, folder: Path) -> LoadReport:
        """Everything in its order: step times, prediction, rounds."""
        from dspark.evaluation.load import measure_load

        records, asked = self._prompts()
        recorded = Recorded.of(records.decoded, self.settings.new_tokens)
        target = served_target(self.inputs, self.paths)
        drafter = served_drafter(self.workspace, self.inputs.build, target)
        cost = self._cost(target, drafter)
        write_model(folder / COST, cost)
        arms, absent = self._arms(drafter, cost)
        predicted = PredictedLoad(
            made_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            build=self.inputs.build,
            target=self.inputs.target,
            gamma=drafter.config.gamma,
            settings=self.settings,
            cost_profile=cost.profile,
            fitted_on=records.ids,
            measured_on=tuple(one.id for one in asked),
            points=predict_load(
                recorded,
                {arm.name: arm.policy for arm in arms},
                MeasuredSteps(cost, packs=target.packs),
                self.settings,
            ),
        )
        (folder / REPORT).unlink(missing_ok=True)  # of an earlier study, which the new prediction does not belong to
        write_model(folder / PREDICTED, predicted)
        comparisons = measure_load(target, arms, [one.token_ids for one in asked], self.settings, self.progress)
        levels = [level.tokens_per_second_per_user for level in self.inputs.profile.service_levels]
        return load_report(name, predicted, comparisons, slas=levels, absent=absent)

    def _prompts(self) -> tuple[RecordSet, list[PreparedPrompt]]:
        """Records to predict from and prompts to ask, of the domains that were trained on: no prompt in both."""
        from dspark.corpus.prompts import read_prompts
        from dspark.evaluation.decoding import spread_prompts

        temperature, most = self.settings.temperature, max(self.settings.concurrency)
        if temperature not in {0.0, *self.inputs.evaluation.temperatures}:
            raise SettingsError(
                f"load.temperature is {temperature:g}, and nothing was evaluated at it",
                f"one of {', '.join(f'{one:g}' for one in self.inputs.evaluation.temperatures)}",
            )
        records = read_records(self.paths.build / "evaluate" / "records" / f"temperature-{temperature:g}.safetensors")
        domains = self.inputs.training_domains
        places = {domain: [i for i, name in enumerate(records.domains) if name == domain][::2] for domain in domains}
        # As many of each domain as in what is asked, where domains take turns.
        each = min(len(found) for found in places.values())
        fitted = records.only(sorted(place for found in places.values() for place in found[:each]))
        everything = read_prompts(self.paths.corpus / "prompts" / "eval.jsonl")
        others = [one for one in everything if one.domain in domains and one.id not in set(fitted.ids)]
        asked = spread_prompts(others, len(others))
        if not fitted.ids or len(asked) < most:
            raise DataError(
                f"{len(fitted.ids)} recorded prompts to predict from and {len(asked)} others to ask are too few for "
                f"{most} requests at a time",
                "name fewer in `load.concurrency` of the study, or give the corpus more prompts: prompts.per_domain",
            )
        return fitted, asked

    def _cost(self, target: Target, drafter: Drafter) -> CostReport:
        """The build's step times if they go from one request as far as the load; else they are measured here."""
        from dspark.profiling.steps import profile_engine

        most, profile = max(self.settings.concurrency), self.inputs.profile
        if self.paths.cost.is_file():
            cost = read_model(self.paths.cost, CostReport)
            steps = MeasuredSteps(cost)
            if cost.draft_backend == "torch" and steps.least_requests == 1 and steps.most_requests >= most:
                return cost
        self.progress.note(f"steps of 1 to {most} requests are measured first: profile {profile.name} lacks some")
        # A round ends with one request, whatever it begins with.
        requests = tuple(sorted({1, *self.settings.concurrency}))
        wanted = profile.model_copy(
            update={"requests": requests, "draft_backend": "torch", "profile_backends": ("torch",)}
        )
        fingerprint: dict[str, Any] = read_json(self.workspace.fingerprint(profile.name))
        return profile_engine(
            target, drafter.config, wanted, fingerprint, seed=self.settings.seed, progress=self.progress
        )

    def _arms(self, drafter: Drafter, cost: CostReport) -> tuple[Sequence[Arm], dict[str, str]]:
        """What takes turns, and the policies that cannot be had."""
        from dspark.decoding.proposers import torch_proposer
        from dspark.evaluation.load import load_arms

        temperatures = fitted_temperatures(self.paths, Sampling(temperature=self.settings.temperature))
        scheduler = None
        if cost.scheduling is not None:
            scheduler = PrefixScheduler(cost.scheduling, drafter.config.gamma, temperatures)
        absent = impossible_policies(
            self.settings.policies, confident=drafter.config.confidence, costed=scheduler is not None
        )
        for name, reason in absent.items():
            if "policies" in self.settings.model_fields_set:
                raise SettingsError(f"policy {name} cannot be had: {reason}", "leave it out of `load.policies`")
            self.progress.note(f"policy {name} is left out: {reason}")
        possible = tuple(name for name in self.settings.policies if name not in absent)
        settings = self.settings.model_copy(update={"policies": possible})
        arms = load_arms(torch_proposer(drafter), settings, scheduler=scheduler, temperatures=temperatures)
        return arms, absent
