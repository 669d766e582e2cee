"""What a run tells the tracking server: its events, as they lie on disk until they are delivered."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dspark.config.models import Digest, Name
from dspark.package.manifest import Digests

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]


class _Json(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)


class Started(_Json):
    """A run began to change something. Always the first event of its journal."""

    kind: Literal["started"] = "started"
    time: float  # seconds since the epoch, as of all events; the order is the journal's, not the clock's
    journal: str = Field(pattern=r"^[0-9a-f]{32}$")  # random: what the run is found by on a server
    run: str  # the run's id in its workspace
    build: Name
    command: str
    dspark_version: str
    user: str
    host: str
    pid: int


class StageEnded(_Json):
    """A stage of the run ended, or needed no run."""

    kind: Literal["stage"] = "stage"
    time: float
    stage: str
    key: str
    status: str
    category: str = ""  # class of the error
    message: str = ""
    metrics: dict[str, float] = {}


class Ended(_Json):
    """The run ended. Where nobody was left to write this, whoever finds the journal does, with KILLED."""

    kind: Literal["ended"] = "ended"
    time: float
    status: RunStatus
    exit_code: int | None = None  # None: killed
    message: str = ""


class PackageMade(_Json):
    """A package to register as candidate of its build. After the end: a run's status is not that of publishing."""

    kind: Literal["package"] = "package"
    time: float
    build: Name
    folder: str  # where it was made, below the workspace if it lies there
    package_digest: Digest
    evidence_digest: Digest

    def names(self, digests: Digests) -> bool:
        """Whether a package of these digests is meant: the same files with the same evidence."""
        return (self.package_digest, self.evidence_digest) == (digests.package_digest, digests.evidence_digest)


def waiting_name(package_digest: str, evidence_digest: str) -> str:
    """What a package's folder is called while it waits to be registered, and MLflow calls it ever after."""
    return f"{package_digest}-{evidence_digest[:16]}"


Event = Started | StageEnded | Ended | PackageMade


class Entry(_Json):
    """`dspark/event/1`: one file of a journal."""

    schema_: Literal["dspark/event/1"] = Field(default="dspark/event/1", alias="schema")
    number: int = Field(ge=1)
    event: Annotated[Event, Field(discriminator="kind")]
