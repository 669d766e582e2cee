"""What a finished run amounts to, from the files of the build."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from dspark.config.models import Build
from dspark.config.stages import BY_NAME
from dspark.io.jsonfile import read_json
from dspark.measured import Measured
from dspark.workspace.layout import Workspace


class Registered(Protocol):
    """A package in the registry (`registry.receipts.Receipt`)."""

    @property
    def model_name(self) -> str:
        """Name of the registered model."""

    @property
    def version(self) -> str:
        """Its version."""


@dataclass(frozen=True)
class Line:
    """One measured number, or why there is none."""

    name: str
    measured: Measured | None
    unit: str = ""
    absent: str = ""

    def __str__(self) -> str:
        if self.measured is None:
            return self.absent or "not measured"
        low, high = self.measured.ci95
        return f"{self.measured.value:.3f}{self.unit}  [{low:.3f}, {high:.3f}]  n={self.measured.n}"


@dataclass(frozen=True)
class Summary:
    """The result of a run."""

    build: str
    package: str
    package_digest: str
    model_digest: str
    lines: tuple[Line, ...]
    model_name: str | None = None
    version: str | None = None

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        value = {key: item for key, item in asdict(self).items() if item is not None and key != "lines"}
        value["measured"] = {
            line.name: line.measured.model_dump(mode="json") if line.measured else {"absent": str(line)}
            for line in self.lines
        }
        return value


def summarise(workspace: Workspace, build: Build, registered: Registered | None) -> Summary:
    """Read the manifest and the evaluation of a build.

    Raises:
        IntegrityError: the package has no sound manifest.
    """
    from dspark.package.verify import read_manifest

    package = BY_NAME["package"].output(build.name, {})
    digests = read_manifest(workspace.root / package).digests
    return Summary(
        build=build.name,
        package=package,
        package_digest=digests.package_digest,
        model_digest=digests.model_digest,
        lines=tuple(_lines(workspace.build(build.name) / "evaluate" / "metrics.json")),
        model_name=registered.model_name if registered else None,
        version=registered.version if registered else None,
    )


def _lines(path: Path) -> list[Line]:
    metrics = read_json(path)
    lines: list[Line] = []
    for temperature, part in sorted(metrics.get("temperatures", {}).items()):
        mean = part.get("mean_of_domains", {})
        lines.append(_line(f"tau at temperature {temperature}, mean of domains", mean.get("tau")))
        for domain, values in part.get("domains", {}).items():
            lines.append(_line(f"tau at temperature {temperature}, {domain}", values.get("tau")))
    return lines


def _line(name: str, value: Any, unit: str = "") -> Line:
    if isinstance(value, dict) and {"value", "n", "ci95"} <= value.keys():
        return Line(name, Measured.model_validate({key: value[key] for key in ("value", "n", "ci95")}), unit)
    return Line(name, None, unit, str(value.get("absent", "")) if isinstance(value, dict) else "")
