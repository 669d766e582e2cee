"""What must be true before anything is changed: extras, domains, the target's files, room on the disk.

Takes well under a second, loads nothing heavy, writes nothing, and reports everything that is missing together.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from dspark.config.build import ResolvedBuild
from dspark.config.models import ServingProfile, ShardRecords, TargetSpec
from dspark.corpus.domains import domain_file
from dspark.device import CPU, accelerator, asked_for, declared, serving_device
from dspark.errors import DsparkError, PreflightError, ServiceError, SettingsError
from dspark.io.yamlfile import read_yaml
from dspark.targets.materialise import require_files
from dspark.workspace.dvc import RESTORE
from dspark.workspace.fetch import is_current
from dspark.workspace.imports import missing_drafter
from dspark.workspace.layout import Workspace
from dspark.workspace.packages import missing_package

PIPELINE_MODULES = ("torch", "transformers", "accelerate", "safetensors", "dvc", "mlflow")
# Below this nothing useful can be made, whatever the build.
MINIMUM_FREE_BYTES = 512 * 1024**2


@dataclass(frozen=True)
class Problem:
    """Something that keeps a run from starting."""

    what: str
    hint: str
    exit_code: int = PreflightError.exit_code

    @classmethod
    def of(cls, where: str, error: DsparkError) -> Problem:
        """What an error says of something, with its exit code where a service cannot be reached."""
        code = error.exit_code if isinstance(error, ServiceError) else PreflightError.exit_code
        return cls(f"{where}: {error.message}", error.hint, code)


def check(workspace: Workspace, resolved: ResolvedBuild) -> None:
    """Raise everything that keeps the build from running.

    Raises:
        PreflightError: all problems, with what mends each.
        ServiceError: the same, if services that cannot be reached are all that is wrong.
    """
    if problems := find_problems(workspace, resolved):
        raise refusal(resolved.name, problems)


def refusal(build: str, problems: Sequence[Problem]) -> DsparkError:
    """The error that some problems are for a build."""
    unreachable = all(problem.exit_code == ServiceError.exit_code for problem in problems)
    kind = ServiceError if unreachable else PreflightError
    if len(problems) == 1:
        return kind(problems[0].what, problems[0].hint)
    lines = [f"{len(problems)} things keep build {build!r} from running"]
    for problem in problems:
        lines += [f"  {problem.what}", *(f"    {line}" for line in problem.hint.splitlines())]
    return kind("\n".join(lines))


def find_problems(workspace: Workspace, resolved: ResolvedBuild) -> list[Problem]:
    """Everything that keeps the build from running."""
    return [
        *missing_extras(resolved),
        *conflicting_runtimes(),
        *unusable_device(resolved),
        *unreadable_pipeline(workspace),
        *unfit_profiles(resolved),
        *unfit_records(workspace, resolved),
        *missing_domains(workspace, resolved),
        *missing_packages(workspace, resolved),
        *missing_imports(workspace, resolved),
        *missing_target(workspace, resolved.build.target),
        *unusable_rivals(workspace, resolved),
        *full_disk(workspace),
    ]


def missing_extras(resolved: ResolvedBuild) -> list[Problem]:
    """Modules that the pipeline needs and this environment lacks; nothing is imported."""
    needed = list(PIPELINE_MODULES)
    if resolved.build.export.onnx:
        needed += ["onnx", "onnxscript"]
    missing = [module for module in needed if importlib.util.find_spec(module) is None]
    problems = []
    if missing:
        problems.append(
            Problem(
                f"not installed: {', '.join(missing)}", "pip install 'dspark[pipeline,cpu]' (on a GPU: pipeline,gpu)"
            )
        )
    if any(item.engine == "llamacpp" and item.access == "local" for item in resolved.profiles):
        absent = [module for module in ("xllamacpp", "gguf") if importlib.util.find_spec(module) is None]
        if absent:
            names = ", ".join(item.name for item in resolved.profiles if item.engine == "llamacpp")
            problems.append(
                Problem(
                    f"not installed: {', '.join(absent)} (for serving profile {names})",
                    "pip install 'dspark[llamacpp]', or name other serving_profiles in the build",
                )
            )
    runtime = resolved.build.export.onnx or any(item.draft_backend == "onnxruntime" for item in resolved.profiles)
    if runtime and importlib.util.find_spec("onnxruntime") is None:
        problems.append(Problem("not installed: onnxruntime", "pip install 'dspark[cpu]', or set export.onnx to false"))
    return problems


def unusable_device(resolved: ResolvedBuild) -> list[Problem]:
    """What `DSPARK_DEVICE` forbids or asks for in vain, and what is missing for profiles that are measured on a GPU.

    torch is loaded only where the variable asks for a GPU, or a profile names one that the driver has.
    """
    if importlib.util.find_spec("torch") is None:
        return []  # said already
    try:
        asked = asked_for()
        if asked is not None:
            accelerator()
    except DsparkError as error:
        return [Problem(error.message, error.hint)]
    problems = []
    for profile in resolved.profiles:
        if profile.engine == "reference" and profile.access == "local" and declared(profile) != CPU:
            problems += [*_unseen_by_torch(profile, asked), *_undraftable(profile, resolved)]
    return problems


def _unseen_by_torch(profile: ServingProfile, asked: str | None) -> list[Problem]:
    """A profile's GPU that the machine has and stages could not use; of one that it has not, `unfit_profiles` tells."""
    from dspark.profiling.fingerprint import gpus_of_the_driver

    name = profile.hardware.accelerator.lower()
    if asked != CPU and not any(name in gpu["name"].lower() for gpu in gpus_of_the_driver()):
        return []
    try:
        serving_device(profile)
    except PreflightError as error:
        return [Problem(error.message, error.hint)]
    return []


def _undraftable(profile: ServingProfile, resolved: ResolvedBuild) -> list[Problem]:
    """ONNX Runtime for the CPU alone, where it is to be timed on a profile's GPU."""
    timed = resolved.build.export.onnx or "onnxruntime" in (profile.draft_backend, *profile.profile_backends)
    if not timed or _installed("onnxruntime-gpu") or not _installed("onnxruntime"):
        return []
    return [
        Problem(
            f"not installed: onnxruntime-gpu (serving profile {profile.name} times ONNX Runtime on {profile.hardware})",
            "pip uninstall onnxruntime && pip install 'dspark[gpu]', or set export.onnx to false and the profile's "
            "profile_backends to [torch]",
        )
    ]


def unfit_profiles(resolved: ResolvedBuild) -> list[Problem]:
    """Serving profiles that this machine, or the target, cannot be measured with."""
    from dspark.profiling.fingerprint import fingerprint, profile_mistakes

    problems = []
    for profile in resolved.profiles:
        if profile.access == "none":
            continue
        try:
            found = fingerprint(profile)
        except DsparkError as error:  # a server that does not answer
            problems.append(Problem.of(f"serving profile {profile.name}", error))
            continue
        problems += [
            Problem(
                f"serving profile {profile.name}: {mistake}",
                "say `access: none` with a reason in the profile, or leave it out of the build's serving_profiles",
            )
            for mistake in profile_mistakes(profile, found)
        ]
        if profile.engine == "llamacpp" and resolved.build.target.source.kind == "random":
            problems.append(
                Problem(
                    f"serving profile {profile.name}: a target of random weights says bytes that are no UTF-8, "
                    "and llama.cpp's server refuses to answer with those",
                    "name a real target, or leave llama.cpp out of the build's serving_profiles",
                )
            )
    return problems


def unfit_records(workspace: Workspace, resolved: ResolvedBuild) -> list[Problem]:
    """Why calibration cannot have the records that it is to take from an engine."""
    from dspark.engines.sglang_client import SGLangClient
    from dspark.engines.sglang_records import require_collecting
    from dspark.engines.sglang_shards import shard_files

    records, profile = resolved.build.calibration.records, resolved.records_profile
    try:
        if isinstance(records, ShardRecords):
            shard_files(workspace.root / records.folder)
        elif profile is not None and profile.records_url is not None:
            require_collecting(SGLangClient(profile.records_url))
    except DsparkError as error:
        return [Problem.of("calibration.records", error)]
    return []


def conflicting_runtimes() -> list[Problem]:
    """Both distributions of ONNX Runtime own one folder: the last one installed wins, removing one breaks both."""
    found = [name for name in ("onnxruntime", "onnxruntime-gpu") if _installed(name)]
    if len(found) < 2:
        return []
    return [
        Problem(
            "onnxruntime and onnxruntime-gpu are both installed; they overwrite each other's files",
            "pip uninstall onnxruntime onnxruntime-gpu, then install the one you need again",
        )
    ]


def unreadable_pipeline(workspace: Workspace) -> list[Problem]:
    """A dvc.yaml or dvc.lock that DVC could not read."""
    path, lock = workspace.root / "dvc.yaml", workspace.root / "dvc.lock"
    problems = []
    try:
        stages = read_yaml(path)
        if not isinstance(stages, dict) or not isinstance(stages.get("stages"), dict):
            problems.append(Problem(f"{path} holds no stages", RESTORE))
    except OSError as error:
        problems.append(Problem(f"{path} cannot be read: {error.strerror}", RESTORE))
    except SettingsError as error:
        problems.append(Problem(error.message, RESTORE))
    if lock.exists() and not lock.is_file():
        problems.append(Problem(f"{lock} is not a file", f"move it out of the way: mv {lock} {lock}.old"))
    return problems


def missing_domains(workspace: Workspace, resolved: ResolvedBuild) -> list[Problem]:
    """Domains whose file or package is not there."""
    folder = workspace.root / "pipeline" / "domains"
    problems = []
    for domain in (*resolved.domains, *resolved.evaluation_domains):
        try:
            domain_file(domain, folder)
        except DsparkError as error:
            problems.append(Problem(error.message, error.hint))
    return problems


def missing_packages(workspace: Workspace, resolved: ResolvedBuild) -> list[Problem]:
    """The package that training starts from, if it is not in the store; what is in it is looked at later."""
    initial = resolved.build.training.initial
    if initial is None or workspace.package(initial.package).is_dir():
        return []
    error = missing_package(workspace, initial.package)
    return [Problem(f"training.initial: {error.message}", error.hint)]


def missing_imports(workspace: Workspace, resolved: ResolvedBuild) -> list[Problem]:
    """The drafter that is to be handed on, if it is not in the store; what is in it is looked at later."""
    digest = resolved.build.training.imported
    if digest is None or workspace.imported(digest).is_dir():
        return []
    error = missing_drafter(workspace, digest)
    return [Problem(f"training.imported: {error.message}", error.hint)]


def missing_target(workspace: Workspace, spec: TargetSpec) -> list[Problem]:
    """Why the target cannot be had, with the way out; empty if it is here or can be fetched."""
    if is_current(workspace, spec):
        return []
    try:
        require_files(spec, workspace.root)
    except DsparkError as error:
        return [Problem(error.message, error.hint)]
    return []


def unusable_rivals(workspace: Workspace, resolved: ResolvedBuild) -> list[Problem]:
    """Packages to measure against that are not there, not sound, or of another target; verified to the byte."""
    if not resolved.build.rivals:
        return []
    from dspark.targets.record import read_record
    from dspark.workspace.rivals import rival_mistake

    target = resolved.build.target
    record = read_record(workspace.target_record(target.name)) if is_current(workspace, target) else None
    found = [rival_mistake(workspace, digest, record) for digest in resolved.build.rivals]
    return [Problem(error.message, error.hint) for error in found if error is not None]


def full_disk(workspace: Workspace) -> list[Problem]:
    """A disk with no room for any build, or a workspace that can't be written to."""
    if not os.access(workspace.root, os.W_OK):
        return [Problem(f"{workspace.root} cannot be written to", "change its permissions, or use another workspace")]
    free = shutil.disk_usage(workspace.root).free
    if free >= MINIMUM_FREE_BYTES:
        return []
    return [
        Problem(
            f"{workspace.root}: {free / 1024**2:.0f} MiB free on the disk, at least "
            f"{MINIMUM_FREE_BYTES / 1024**2:.0f} MiB are needed",
            "free some space (what runs made lies in .dspark, .dvc/cache, corpora and builds)",
        )
    ]


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
