"""Who held a stage, in order: worked out from the copies alone, so that every reader comes to the same answer.

MLflow has no conditional write: an alias is overwritten by whoever comes last. Version numbers, however, are given out
one by one, and tags can be written with a version in one transaction. So every promotion adds a copy to the stage's
model that names the copy it replaces; of several that name the same one, the lowest number counts and the others are
void. Copies are only ever added and numbers only rise, hence a chain only grows: who has won once has won.

Loads no mlflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dspark.errors import IntegrityError
from dspark.registry.gate_report import Stage

Kind = Literal["promotion", "rollback"]
PREFIX = "dspark.promotion."
STAGES: tuple[Stage, ...] = ("staging", "production")
VOID_TAG = f"{PREFIX}void"
FIRST = "none"  # what the first promotion of a stage replaces; MLflow drops tags without a value on the wire


@dataclass(frozen=True)
class Link:
    """One promotion, as its copy tells it.

    Attributes:
        version: of the copy, in the stage's model.
        identity: made up by the promotion that wrote it, so that it knows its own.
        source_version: of the build's model.
        package_digest: of the package.
        replaces: the copy that held the stage before; 0: nobody did.
        kind: what it was for.
        restores: the earlier link that a rollback goes back to.
        by: who.
        at: when, UTC.
        reason: why, if anybody said so.
        git_commit: of the workspace, or why there is none.
        gates: sha256 of the gate report's canonical JSON; a rollback asks no gates.
        forced: against the gates.
        void: why it does not count, as marked; None unless somebody saw it lose.
    """

    version: int
    identity: str
    source_version: int
    package_digest: str
    replaces: int
    kind: Kind
    by: str
    at: str
    git_commit: str
    restores: int | None = None
    reason: str | None = None
    gates: str | None = None
    forced: bool = False
    void: str | None = None

    def tags(self, model: str) -> dict[str, str]:
        """What is written with the copy; `version` is given by the registry."""
        found = {
            "into": model,
            "id": self.identity,
            "source_version": str(self.source_version),
            "replaces": str(self.replaces or FIRST),
            "kind": self.kind,
            "by": self.by,
            "at": self.at,
            "git_commit": self.git_commit,
            "restores": self.restores,
            "reason": self.reason,
            "gates_digest": self.gates,
            "forced": "true" if self.forced else None,
        }
        return {f"{PREFIX}{key}": str(value) for key, value in found.items() if value is not None}

    def as_json(self) -> dict[str, Any]:
        """For `--json`; what is absent is left out."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Removed:
    """A link whose copy somebody deleted; later ones still name it."""

    version: int


@dataclass(frozen=True)
class Chain:
    """The history of one stage of one build.

    Attributes:
        model: the stage's model.
        entries: every promotion that counted, oldest first.
        void: copies that lost, by version.
    """

    model: str
    entries: tuple[Link | Removed, ...] = ()
    void: tuple[Link, ...] = ()

    @property
    def links(self) -> tuple[Link, ...]:
        """The promotions that are still there, oldest first."""
        return tuple(entry for entry in self.entries if isinstance(entry, Link))

    @property
    def head(self) -> Link | None:
        """Who holds the stage."""
        return self.links[-1] if self.links else None

    @property
    def tip(self) -> int:
        """The number that the next promotion must name as the one it replaces; 0 if it is the first."""
        return self.entries[-1].version if self.entries else 0

    def winner_over(self, link: Link) -> int | None:
        """The version that replaced what a void copy wanted to replace; None if it was deleted since."""
        return min((entry.version for entry in self.entries if entry.version > link.replaces), default=None)

    def holds(self, identity: str) -> Link | None:
        """The link with this identity, or None if it is not part of history."""
        return next((link for link in self.links if link.identity == identity), None)

    def origin(self, link: Link) -> Link | Removed:
        """The promotion that first brought what a link holds: a rollback's is the one that it restored."""
        if link.kind == "promotion" or link.restores is None:
            return link
        return next((entry for entry in self.entries if entry.version == link.restores), Removed(link.restores))

    def before(self, link: Link) -> Link | Removed | None:
        """What held the stage before what a link holds; rolling back twice goes back twice, not forth again."""
        origin = self.origin(link)
        earlier = [entry for entry in self.entries if entry.version < origin.version]
        if not earlier:
            return None
        return self.origin(earlier[-1]) if isinstance(earlier[-1], Link) else earlier[-1]


def chain_of(model: str, copies: Iterable[Link]) -> Chain:
    """The chain that follows from the copies of a stage's model, in whatever order they are given."""
    by_version = {copy.version: copy for copy in copies}
    # Whoever wrote a copy had seen the one it replaces hold the stage: a number that is named and gone was a link.
    gone = {copy.replaces for copy in by_version.values()} - by_version.keys()
    entries: list[Link | Removed] = []
    last = 0
    while True:
        # Somebody saw a marked one lose; should the winner have been deleted since, it has lost all the same.
        after = [copy.version for copy in by_version.values() if copy.replaces == last and copy.void is None]
        after = [version for version in (*after, *gone) if version > last]
        if not after:
            break
        last = min(after)
        entries.append(by_version.get(last, Removed(last)))
    chosen = {entry.version for entry in entries}
    void = sorted(
        (copy for version, copy in by_version.items() if version not in chosen), key=lambda copy: copy.version
    )
    return Chain(model, tuple(entries), tuple(void))


def read_link(model: str, version: int, tags: Mapping[str, str]) -> Link | None:
    """The link that a version of a stage's model is, or None for a version that no promotion into this model wrote.

    Raises:
        IntegrityError: a promotion wrote it, and its tags were changed since.
    """
    found = {key.removeprefix(PREFIX): value for key, value in tags.items() if key.startswith(PREFIX)}
    if found.get("into") != model:  # MLflow's own copying takes tags along, those of another stage's promotion as well
        return None
    try:
        kind = found["kind"]
        if kind not in ("promotion", "rollback"):
            raise ValueError(f"kind is {kind!r}")
        link = Link(
            version=version,
            identity=found["id"],
            source_version=_number(found["source_version"]),
            package_digest=tags["dspark.package_digest"],
            replaces=0 if found["replaces"] == FIRST else _number(found["replaces"]),
            kind="promotion" if kind == "promotion" else "rollback",
            by=found["by"],
            at=found["at"],
            git_commit=found["git_commit"],
            restores=_number(found["restores"]) if "restores" in found else None,
            reason=found.get("reason"),
            gates=found.get("gates_digest"),
            forced=found.get("forced") == "true",
            void=found.get("void"),
        )
        if link.replaces >= version or (link.restores or 0) >= version:
            raise ValueError("it names a later version as earlier")
    except (KeyError, ValueError) as reason:
        what = f"tag {reason} is missing" if isinstance(reason, KeyError) else str(reason)
        raise IntegrityError(
            f"{model} version {version}: the tags of its promotion were changed: {what}",
            "restore them from a backup of the registry; history cannot be told without them",
        ) from None
    return link


def stage_model(build: str, stage: Stage) -> str:
    """The registered model that holds the promotions of a build into a stage."""
    return f"dspark-{build}-{stage}"


def _number(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{text} is no version")
    return value
