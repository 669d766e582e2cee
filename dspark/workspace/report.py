"""`dspark report`: which build or package is meant, what it is compared with, and where the report goes."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path

from dspark.config.build import ResolvedBuild
from dspark.config.stages import BY_NAME
from dspark.errors import PreflightError, SettingsError
from dspark.package.layout import LINEAGE, MANIFEST
from dspark.package.manifest import Manifest
from dspark.package.verify import read_manifest, require_folder, verify
from dspark.report.page import Evidence, Page, read_evidence, tell
from dspark.report.page.evidence import Files, package_files
from dspark.targets.record import read_record
from dspark.workspace.champion import NothingInProduction, fetch_champion
from dspark.workspace.layout import Workspace
from dspark.workspace.plots import plot_sources
from dspark.workspace.results import flags_of, latest_run
from dspark.workspace.results import read_record as read_run
from dspark.workspace.run import Request, resolve_request

CHAMPION = "champion"
FILE = "report.html"
_HINT = "name a build, a package's folder, or run inside a workspace: dspark report NAME"


class Reporter:
    """Finds what is asked about. A package needs no workspace, so that is looked for when it is needed.

    Args:
        workspace: finds it; raises PreflightError where there is none.
        tracking_uri: of the registry, which knows the champion.
    """

    def __init__(self, workspace: Callable[[], Workspace], tracking_uri: Callable[[], str]) -> None:
        self._workspace = workspace
        self._tracking_uri = tracking_uri

    def page(self, name: str | None, against: str | None) -> tuple[Page, Evidence]:
        """The report of a build or package.

        Args:
            name: a build, or the folder of a package; None: the build of the newest run.
            against: the same, or `champion`, or `models:/...`; None: it is compared with nothing.
        Raises:
            SettingsError: no such build, or no such folder.
            PreflightError: there is no workspace where one is needed, nothing to tell yet, no champion, or it cannot be
                fetched.
            IntegrityError: a package is not what its manifest says.
            ServiceError: the registry does not answer.
        """
        evidence = self.evidence(name if name is not None else self._newest())
        other = self._other(evidence, against) if against is not None else None
        return tell(evidence, other, today=datetime.datetime.now(datetime.UTC).date()), evidence

    def evidence(self, name: str) -> Evidence:
        """What a build or a package has on record."""
        folder = Path(name)
        if (folder / MANIFEST).is_file() or os.sep in name:
            require_folder(folder)
            return _of_package(folder, name)
        evidence = read_evidence(_build_files(self._workspace(), name))
        if evidence.nothing:
            lines = [f"build {name!r} has nothing to tell yet"]
            lines += [f"  {what}: {reason}" for what, reason in evidence.absent.items()]
            raise PreflightError("\n".join(lines), f"dspark run --build {name}")
        return evidence

    def destination(self, evidence: Evidence) -> Path:
        """Where an HTML report goes unless somebody says otherwise: beside a build's results, never into a package."""
        if evidence.files.is_build:
            return self._workspace().build(evidence.files.name) / FILE
        return Path(f"{evidence.files.name}-{(evidence.digest or '')[:12]}.html")

    def _other(self, evidence: Evidence, against: str) -> Evidence:
        if against != CHAMPION and not against.startswith("models:"):
            return self.evidence(against)
        workspace = self._workspace()
        source = None if against == CHAMPION else against
        build = evidence.files.build
        try:
            manifest = fetch_champion(workspace, build, source, tracking_uri=self._tracking_uri())
        except NothingInProduction:  # what it says is about training on from it
            raise PreflightError(
                f"build {build!r}: nothing is in production, so there is no champion to compare with",
                f"compare with a build or a package's folder: dspark report {build} --against NAME",
            ) from None
        folder = workspace.package(manifest.digests.package_digest)
        return _of_package(folder, str(folder.relative_to(workspace.root)))

    def _newest(self) -> str:
        try:
            run = latest_run(self._workspace().runs)
        except PreflightError as error:
            raise PreflightError(f"which build or package? {error.message}", _HINT) from None
        if run is None:
            raise SettingsError("which build or package? there was no run yet", _HINT)
        return read_run(run).build


def require_outside_packages(path: Path) -> None:
    """Refuse a place in a package: one file too many, and it does not verify any more.

    Raises:
        SettingsError: the folder of `path`, or one above it, is a package.
    """
    for folder in path.absolute().parents:
        if (folder / MANIFEST).is_file():
            raise SettingsError(
                f"--out {path}: {folder} is a package, which nothing may be added to", "name a file elsewhere"
            )


def _of_package(folder: Path, shown: str) -> Evidence:
    """The evidence of a package, which is verified before anything of it is believed."""
    manifest = read_manifest(folder)
    verify(folder)
    return read_evidence(package_files(folder, manifest, shown))


def _build_files(workspace: Workspace, name: str) -> Files:
    """Where the records of a build lie, with the settings of its newest run: where costs lie follows from them.

    Raises:
        SettingsError: no such build.
    """
    request = Request(build=name, flags=flags_of(workspace.runs, name), environment=dict(os.environ))
    resolved = resolve_request(workspace, request).chosen
    package = BY_NAME["package"].output(name, {})
    folder = workspace.root / package
    manifest = read_manifest(folder) if (folder / MANIFEST).is_file() else None
    return Files(
        name=name,
        build=name,
        plots=plot_sources(workspace, resolved),
        parity=workspace.build(name) / "export" / "parity.json",
        lineage=folder / LINEAGE,
        manifest=manifest,
        package=package if manifest is not None else None,
        target=_weights(workspace, resolved, manifest),
        is_build=True,
    )


def _weights(workspace: Workspace, resolved: ResolvedBuild, manifest: Manifest | None) -> str | None:
    """Digest of the target's weights, as far as it was fetched."""
    if manifest is not None:
        return manifest.inputs.target.weights_digest
    record = workspace.target_record(resolved.build.target.name)
    return read_record(record).weights_digest if record.is_file() else None
