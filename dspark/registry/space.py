"""Is there room for the copies that registering a package makes?"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from dspark.errors import PreflightError

_MARGIN_BYTES = 16 * 1024**2  # MLflow's own files beside the package, and the database's growth


def require_space(package: Path, package_bytes: int, artifacts: Path | None) -> None:
    """Refuse to begin what would fill a disk.

    MLflow copies a package to the temporary folder first and from there to the artifacts.

    Args:
        package: for the message.
        package_bytes: its size.
        artifacts: where the registry keeps its artifacts if that is a folder of this machine.
    Raises:
        PreflightError: with the bytes that are needed and those that are free.
    """
    needed: dict[int, int] = {}
    places: dict[int, Path] = {}
    for folder in (Path(tempfile.gettempdir()), *([artifacts] if artifacts is not None else [])):
        place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        device = place.stat().st_dev
        needed[device] = needed.get(device, _MARGIN_BYTES) + package_bytes
        places[device] = place
    for device, count in needed.items():
        free = shutil.disk_usage(places[device]).free
        if free < count:
            raise PreflightError(
                f"registering {package} needs {count} bytes on the file system of {places[device]}, {free} are free",
                "make room (TMPDIR may name another place for temporary files), then: dspark registry sync",
            )
