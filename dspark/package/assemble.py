"""Assemble a package from what a build's stages wrote, completely or not at all.

The order follows the digests: deployable files first, their digest names the package, and the evidence (certificate,
summary, model card) speaks about that digest; the manifest lists it all and comes last.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from dspark.calibration.results import read_report
from dspark.corpus.prompts import read_prompts
from dspark.drafters.description import read_description
from dspark.engines import ENGINES, EngineInputs, engine_files
from dspark.engines.onnx_io import OnnxIO
from dspark.errors import DataError, IntegrityError, SettingsError, StageError
from dspark.evaluation.entry import CertificateEntry
from dspark.evaluation.results import EvaluationMetrics
from dspark.export.report import ParityReport
from dspark.io.atomic import atomic_path, replace_tree, write_bytes, write_text
from dspark.io.digest import digest_file
from dspark.io.jsonfile import canonical_json, model_json, read_json, read_model, validation_text, write_model
from dspark.io.jsonlines import write_jsonlines
from dspark.package.certificate import Certificate, EngineFiles
from dspark.package.layout import (
    CALIBRATION,
    CARD,
    CERTIFICATE,
    DRAFTER_CONFIG,
    DRAFTER_WEIGHTS,
    LINEAGE,
    MANIFEST,
    ONNX_IO,
    PROFILE,
    RULES,
    SCHEDULER,
    SMOKE,
    TARGET_ENDS,
    path_mistake,
    place_of,
)
from dspark.package.manifest import Description, FileEntry, Manifest, compose, manifest_bytes
from dspark.package.monitoring import prometheus_rules, rules_text
from dspark.package.sources import AGAIN, Sources, describe
from dspark.package.speculation import speculation_profile
from dspark.package.verify import verify
from dspark.profiling.cost import CostReport
from dspark.scheduling.config import CostModel, SchedulerConfig, write_scheduler

Card = Callable[[Path, Description], str]

LARGE_BYTES = 2**29  # of a target's embedding and head: larger ones are left out, unless the build says otherwise
SMOKE_PROMPTS = 20
_EXPORTED = ("llamacpp", "onnxruntime", "tensorrt")  # engines whose own form of the drafter the export writes
# Every engine that packages are made for (package.md); each has files, or the certificate says why not.
_ENGINES = ("llamacpp", "onnxruntime", "sglang", "tensorrt", "tensorrt_llm", "vllm")


def assemble(sources: Sources, out: Path, *, card: Card, work: Path | None = None) -> Manifest:
    """Make a package and put it in the place of `out` by one rename. Equal sources give equal digests.

    Args:
        card: makes the model card from the unfinished package (all but the card and the manifest) and its description.
        work: a folder for the unfinished package, on the file system of `out`; None: beside it.
    Raises:
        DataError: a file of a stage is missing or does not validate.
        StageError: the stages' files contradict each other, so that the package would not verify.
    """
    staged = (work or out.parent / f".{out.name}.part") / "package"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        manifest = _stage(sources, staged, card)
        verify(staged, digest=manifest.digests.self_digest)
    except (IntegrityError, ValidationError) as reason:
        what = validation_text(reason) if isinstance(reason, ValidationError) else reason.message
        raise StageError(
            f"the outputs of build {sources.build.name} make no sound package: {what}",
            f"{AGAIN}; otherwise this is a fault of dspark",
        ) from reason
    replace_tree(staged, out)
    if work is None:
        staged.parent.rmdir()
    return manifest


def _stage(sources: Sources, staged: Path, card: Card) -> Manifest:
    """Write every file of the package into an empty folder."""
    ends = _left_out(sources)
    _copy_drafter(sources, staged, without=ends)
    scheduler = _write_scheduler(sources, staged)
    engines = _write_engines(sources, scheduler, staged)
    description = describe(sources, staged, [*_entries(staged), *ends])
    _write_evidence(sources, description, engines, staged)
    write_text(staged / CARD, card(staged, description))
    manifest = compose(description, [*_entries(staged), *ends])
    write_bytes(staged / MANIFEST, manifest_bytes(manifest))
    return manifest


def _left_out(sources: Sources) -> tuple[FileEntry, ...]:
    """The file of the target's embedding and head, if the package is to be without it.

    Raises:
        StageError: it is not the file that `io.json` describes.
    """
    setting, folder = sources.build.export.onnx_target_ends, sources.export / "onnxruntime"
    if setting == "include" or not folder.is_dir():
        return ()
    ends = read_model(folder / Path(ONNX_IO).name, OnnxIO, hint=AGAIN).ends
    if not ends.pieces or (setting == "auto" and ends.bytes <= LARGE_BYTES):
        return ()
    if digest_file(folder / ends.file) != ends.sha256:
        raise StageError(f"{folder / ends.file} is not the file that io.json describes", AGAIN)
    values = {"path": TARGET_ENDS, "bytes": ends.bytes, "sha256": ends.sha256, "class": "model", "made_from": "target"}
    return (FileEntry.model_validate(values),)


def _copy_drafter(sources: Sources, staged: Path, *, without: tuple[FileEntry, ...]) -> None:
    for name in (DRAFTER_CONFIG, DRAFTER_WEIGHTS):
        _copy(sources.export / name, staged / name)
    for engine in _EXPORTED:
        folder = sources.export / engine
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            name = f"engines/{engine}/{path.name}"
            if name not in {entry.path for entry in without}:
                _copy(path, staged / name)


def _write_scheduler(sources: Sources, staged: Path) -> SchedulerConfig:
    calibration = read_report(sources.calibrate / "calibration.json")
    _copy(sources.calibrate / "calibration.json", staged / CALIBRATION)
    curves, additive = {}, {}
    models: dict[str, CostModel] = {}
    for profile, path in sources.costs.items():
        cost = read_model(path, CostReport, hint=AGAIN)
        _copy(path, staged / "scheduler" / "cost" / f"{profile}.json")
        if cost.curve is not None:
            curves[profile] = cost.curve
        if cost.additive is not None:
            additive[profile] = cost.additive
        if cost.additive_is_closer:
            models[profile] = "additive"
    scheduler = SchedulerConfig(
        gamma=sources.build.drafter.gamma,
        calibrations=calibration.temperatures,
        curves=dict(sorted(curves.items())),
        additive=dict(sorted(additive.items())),
        cost_models=dict(sorted(models.items())),
        policy="scheduled" if calibration.results else f"fixed({calibration.gamma})",
    )
    write_scheduler(staged / SCHEDULER, scheduler)
    return scheduler


def _write_engines(sources: Sources, scheduler: SchedulerConfig, staged: Path) -> tuple[EngineFiles, ...]:
    """Write what each engine loads; `onnxruntime` has its files from the export already."""
    found = []
    for engine in _ENGINES:
        reason = _write_engine(engine, sources, scheduler, staged)
        found.append(EngineFiles(engine=engine, status="absent" if reason else "written", reason=reason))
    return tuple(found)


def _write_engine(engine: str, sources: Sources, scheduler: SchedulerConfig, staged: Path) -> str | None:
    """Write the files of one engine, or say why there are none."""
    if engine in _EXPORTED and not (staged / "engines" / engine).is_dir():
        return _why_not_exported(sources, engine)
    if engine in ("onnxruntime", "tensorrt"):
        return None  # these files are all there is
    if engine not in ENGINES:
        return "this version of dspark writes no files for this engine"
    try:
        files = engine_files(engine, _engine_inputs(sources, scheduler, engine, staged))
    except (SettingsError, DataError) as reason:
        return reason.message
    for path, data in files.items():
        write_bytes(staged / path, data)
    return None


def _why_not_exported(sources: Sources, engine: str) -> str:
    dialect = {"llamacpp": "gguf", "onnxruntime": "onnx", "tensorrt": "tensorrt"}[engine]
    if engine == "tensorrt" and not sources.build.export.onnx:
        dialect = "onnx"  # there is nothing to make a recipe of
    return read_model(sources.export / "parity.json", ParityReport, hint=AGAIN).why_absent(dialect)


def _engine_inputs(sources: Sources, scheduler: SchedulerConfig, engine: str, staged: Path) -> EngineInputs:
    """The inputs of an adapter: the cost curve of a profile of that engine, else of the first that was measured."""
    measured = [profile for profile in sources.profiles if profile.name in scheduler.curves]
    chosen = next((profile.name for profile in measured if profile.engine == engine), None)
    chosen = chosen or next((profile.name for profile in measured), "")
    config, own = read_description(read_json(staged / DRAFTER_CONFIG), DRAFTER_CONFIG)
    cost = read_model(sources.costs[chosen], CostReport) if chosen else None
    return EngineInputs(
        drafter=config,
        target=sources.record,
        scheduler=scheduler,
        profile=chosen,
        fingerprint=cost.fingerprint if cost else {},
        model_errors=cost.model_errors if cost else None,
        no_curve=None if chosen else _why_no_curve(sources),
        temperature=sources.record.sampling.temperature,
        provenance={"drafter_weights_sha256": own["weights_sha256"], "target_digest": sources.record.digest},
    )


def _why_no_curve(sources: Sources) -> str:
    """Why no serving profile has a cost curve, each with its name."""
    reasons = []
    for profile in sources.profiles:
        if profile.name in sources.costs:
            reasons.append(read_model(sources.costs[profile.name], CostReport, hint=AGAIN).why_no_curve)
        else:
            reasons.append(
                f"serving profile {profile.name} has no cost curve: {profile.reason or 'it was not profiled'}"
            )
    return "; ".join(filter(None, reasons)) or "no cost curve: the build names no serving profile"


def _write_evidence(sources: Sources, description: Description, engines: tuple[EngineFiles, ...], staged: Path) -> None:
    entries = {
        profile: read_model(path, CertificateEntry, hint=AGAIN) for profile, path in sources.certificates.items()
    }
    certificate = Certificate(
        subject=description.package_digest,
        gamma=description.drafter.gamma,
        entries=tuple(entry for _, entry in sorted(entries.items())),
        engines=engines,
    )
    write_model(staged / CERTIFICATE, certificate)
    for path in sorted(sources.evaluate.rglob("*")):
        if path.is_file():
            _copy(path, staged / "evidence" / "evaluate" / path.relative_to(sources.evaluate))
    for profile, path in sources.certificates.items():
        _copy(path, staged / "evidence" / "certify" / f"{profile}.json")
    _copy(sources.calibrate / "reliability.csv", staged / "evidence" / "calibrate" / "reliability.csv")
    _copy(sources.train / "curves.csv", staged / "evidence" / "train" / "curves.csv")
    _copy(sources.export / "parity.json", staged / "evidence" / "parity.json")
    write_model(staged / LINEAGE, sources.lineage)
    metrics = read_model(sources.evaluate / "metrics.json", EvaluationMetrics, hint=AGAIN)
    write_model(staged / PROFILE, speculation_profile(metrics, certificate))
    write_text(staged / RULES, rules_text(prometheus_rules(description, certificate)))
    _write_smoke(sources, staged / SMOKE)


def _write_smoke(sources: Sources, path: Path) -> None:
    """Prompts of the eval split for `package smoke`, domains in turn: the first ones, which were evaluated too."""
    from dspark.evaluation.decoding import spread_prompts

    prompts = [
        one
        for one in read_prompts(sources.corpus / "prompts" / "eval.jsonl")
        if "\x7f" not in canonical_json(model_json(one))  # a control character that JSON does not escape
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_jsonlines(path, [model_json(one) for one in spread_prompts(prompts, SMOKE_PROMPTS)])


def _copy(source: Path, destination: Path) -> None:
    try:
        with atomic_path(destination) as temporary:
            shutil.copyfile(source, temporary)
    except FileNotFoundError:
        raise DataError(f"{source}: file not found", AGAIN) from None


def _entries(staged: Path) -> list[FileEntry]:
    """Every file of the unfinished package.

    Raises:
        StageError: a file that has no place in a package.
    """
    entries = []
    for path in sorted(staged.rglob("*")):
        if path.is_dir():
            continue
        name = path.relative_to(staged).as_posix()
        place = place_of(name)
        mistake = path_mistake(name)
        if place is None or mistake:
            raise StageError(f"a stage wrote {name}, which {mistake}", "this is a fault of dspark: report it")
        entries.append(
            FileEntry(path=name, bytes=path.stat().st_size, sha256=digest_file(path), class_=place.file_class)
        )
    return entries
