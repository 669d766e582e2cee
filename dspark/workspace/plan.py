"""`dspark plan`: what `dspark run` would do, and what it would take as far as that is known."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dspark.config.build import ResolvedBuild
from dspark.config.resolve import Pipeline
from dspark.errors import DataError, ServiceError
from dspark.io.jsonfile import read_model
from dspark.workspace import preflight
from dspark.workspace.dvc import changed_stages
from dspark.workspace.fetch import is_current
from dspark.workspace.graph import Instance, feeds, instances
from dspark.workspace.layout import Workspace
from dspark.workspace.lock import repair_dvc, run_lock
from dspark.workspace.results import StageResult, result_path
from dspark.workspace.run import prepare


@dataclass(frozen=True)
class Step:
    """One stage of the plan."""

    name: str
    action: Literal["will run", "may run", "up to date"]
    reason: str = ""
    last_seconds: float | None = None  # what it took when it last ran here
    bytes: int | None = None  # what it left when it last ran; an estimate for features that are still to be made


@dataclass(frozen=True)
class Plan:
    """What a run would do."""

    build: str
    target: str
    problems: tuple[preflight.Problem, ...]
    steps: tuple[Step, ...]
    free_bytes: int

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {"schema": "dspark/plan/1", **asdict(self)}


def plan(workspace: Workspace, pipeline: Pipeline) -> Plan:
    """Compare the build with what is there. Writes only generated files in `.dspark/`.

    Raises:
        PreflightError: a run is under way, or dvc.yaml cannot be read.
        ServiceError: a server of a serving profile does not answer, so that what is up to date cannot be told.
    """
    chosen = pipeline.chosen
    problems = tuple(preflight.find_problems(workspace, chosen))
    unreadable = preflight.unreadable_pipeline(workspace)  # as a server that is away: nothing can be compared
    if unreadable or any(problem.exit_code == ServiceError.exit_code for problem in problems):
        raise preflight.refusal(chosen.name, problems)  # the very error of `dspark run`
    fetched = is_current(workspace, chosen.build.target)
    steps = [
        Step(f"target@{chosen.build.target.name}", "up to date")
        if fetched
        else Step(f"target@{chosen.build.target.name}", "will run", "it is not fetched yet, or its source changed")
    ]
    with run_lock(workspace, f"dspark plan of build {chosen.name!r}", lambda message: None):
        repair_dvc(workspace)
        prepare(workspace, pipeline)
        changed = changed_stages(workspace, f"package@{chosen.name}")
    acting: list[Instance] = []
    for instance in instances(chosen):
        reasons = changed.get(instance.name, [])
        behind = [other.name for other in acting if feeds(other, instance)]
        size = _size(workspace.root / instance.stage.output(instance.key, instance.entry))
        if instance.stage.name == "features":
            size = _feature_bytes(workspace, chosen) or size
        last = _last_seconds(workspace, instance)
        if reasons:
            steps.append(Step(instance.name, "will run", reasons[0], last, size))
        elif behind or not fetched:
            verb = "come" if len(behind) > 1 else "comes"
            reason = f"if {', '.join(behind) or 'the target'} {verb} out different"
            steps.append(Step(instance.name, "may run", reason, last, size))
        else:
            steps.append(Step(instance.name, "up to date", "", last, size))
        if reasons or behind:
            acting.append(instance)
    return Plan(chosen.name, chosen.build.target.name, problems, tuple(steps), shutil.disk_usage(workspace.root).free)


def _last_seconds(workspace: Workspace, instance: Instance) -> float | None:
    for run in sorted(workspace.runs.glob("*"), reverse=True):
        path = result_path(run, instance.stage.name, instance.key)
        if not path.is_file():
            continue
        try:
            result = read_model(path, StageResult)
        except DataError:
            continue  # written by another version, or cut off: an older run may know
        if result.status == "ran":
            return result.seconds
    return None


def _size(path: Path) -> int | None:
    if path.is_file():
        return path.stat().st_size
    if not path.is_dir():
        return None
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _feature_bytes(workspace: Workspace, resolved: ResolvedBuild) -> int | None:
    """Bytes of the shards: as listed by the manifest, else at most, from the prompts and the target's shape."""
    from dspark.corpus.summary import PromptsSummary
    from dspark.features.sizes import bytes_per_token
    from dspark.features.store import FeatureManifest
    from dspark.targets.record import read_record

    corpus = resolved.build.corpus
    folder = workspace.root / "corpora" / corpus.name
    try:
        return read_model(folder / "features" / "manifest.json", FeatureManifest).bytes
    except DataError:
        pass  # not made yet: estimated below
    try:
        record = read_record(workspace.target_record(resolved.build.target.name))
        splits = read_model(folder / "prompts" / "summary.json", PromptsSummary).splits
    except DataError:
        return None
    tokens = 0
    for split, samples in (("train", corpus.responses.samples_per_prompt), ("dev", 1)):
        count = splits[split]
        tokens += samples * (count.tokens + count.prompts * corpus.responses.max_new_tokens)
    whole = tokens * bytes_per_token(record.hidden_size, len(record.taps), corpus.features.dtype)
    limit = {"cached": whole, "online": 0, "hybrid": int((corpus.features.cache_gib or 0) * 2**30)}
    return min(whole, limit[corpus.features.mode])
