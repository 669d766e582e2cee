"""How each engine is started from a package's folder, as far as the package holds something for it."""

from __future__ import annotations

import shlex
from pathlib import Path

from dspark.errors import IntegrityError, SettingsError
from dspark.io.jsonfile import read_model
from dspark.package.certificate import Certificate
from dspark.package.layout import CERTIFICATE


def launch_commands(folder: Path) -> dict[str, str]:
    """Shell commands by engine; for an engine that is used as a library, the command that shows or builds it.

    Args:
        folder: a verified package.
    Raises:
        IntegrityError: its certificate cannot be read.
    """
    found: dict[str, str] = {}
    for engine, reason in _engines(folder).items():
        script = folder / "engines" / engine / "launch.sh"
        if reason is None and script.is_file():
            found[engine] = shlex.join(["bash", str(script)])
        elif reason is None and engine == "tensorrt":
            found[engine] = shlex.join(["dspark", "package", "build-engine", str(folder)])
        elif reason is None and engine == "onnxruntime":
            place = str(folder / "engines" / engine)
            found[engine] = f"python examples/onnxruntime/decode.py --drafter {shlex.quote(place)} --target TARGET"
    return found


def launch_command(folder: Path, engine: str) -> str:
    """The command of one engine.

    Raises:
        SettingsError: the package holds nothing for it; gives the certificate's reason.
        IntegrityError: its certificate cannot be read.
    """
    commands = launch_commands(folder)
    if engine not in commands:
        reason = _engines(folder).get(engine) or "packages are made for other engines"
        raise SettingsError(
            f"{folder} holds no files for {engine}: {reason}", f"it has some for: {', '.join(commands) or 'none'}"
        )
    return commands[engine]


def _engines(folder: Path) -> dict[str, str | None]:
    """Every engine that the certificate speaks of, and why there is nothing for it."""
    certificate = read_model(folder / CERTIFICATE, Certificate, IntegrityError)
    return {item.engine: item.reason for item in certificate.engines}
