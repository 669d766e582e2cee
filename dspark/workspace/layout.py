"""Where things lie in a workspace, and how one is found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dspark.errors import PreflightError

MARKS = ("dvc.yaml", "pipeline", "stages")  # what makes a folder a workspace


@dataclass(frozen=True)
class Workspace:
    """Paths of one workspace.

    Args:
        root: the folder with `dvc.yaml`.
    """

    root: Path

    @property
    def state(self) -> Path:
        """Everything that dspark keeps for itself."""
        return self.root / ".dspark"

    @property
    def store(self) -> Path:
        """Expensive results, keyed by digest."""
        return self.state / "store"

    @property
    def runs(self) -> Path:
        """One folder per `dspark run`."""
        return self.state / "runs"

    @property
    def exports(self) -> Path:
        """One file per target that was exported."""
        return self.state / "exports"

    @property
    def dag(self) -> Path:
        """The dictionaries that `dvc.yaml` runs over."""
        return self.state / "dag.json"

    @property
    def lock(self) -> Path:
        """Held by the run that is under way."""
        return self.state / "run.lock"

    @property
    def room_aside(self) -> Path:
        """Blocks that the run under way gives back to write down how it ended."""
        return self.state / "room"

    @property
    def dvc_cache(self) -> Path:
        """DVC's own databases."""
        return self.state / "dvc"

    def fingerprint(self, profile: str) -> Path:
        """What the timings of a serving profile hold for."""
        return self.state / "fingerprints" / f"{profile}.json"

    def target_record(self, target: str) -> Path:
        """The record that stages depend on."""
        return self.root / "targets" / f"{target}.json"

    def package(self, digest: str) -> Path:
        """A package that was fetched to measure against or to train on from, by its package_digest."""
        return self.store / "packages" / digest

    @property
    def drafters(self) -> Path:
        """Drafters that were imported, by the digest of their files."""
        return self.store / "drafters"

    def imported(self, digest: str) -> Path:
        """An imported drafter."""
        return self.drafters / digest

    def build(self, name: str) -> Path:
        """Outputs of a build."""
        return self.root / "builds" / name

    def study(self, build: str, name: str) -> Path:
        """What a study of a build came to."""
        return self.root / "studies" / build / name

    def work(self, stage: str, digest: str) -> Path:
        """Unfinished work of one stage on one set of inputs."""
        return self.state / "work" / stage / digest


def find_workspace(start: Path | None = None) -> Workspace:
    """The workspace that `start` (None: the current folder) lies in.

    Raises:
        PreflightError: there is none on the way up.
    """
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if all((folder / mark).exists() for mark in MARKS):
            return Workspace(folder)
    raise PreflightError(
        f"{here} is not inside a workspace (a folder with {', '.join(MARKS)})",
        "make one: dspark init DIR; or name one: dspark --workspace DIR ...",
    )
