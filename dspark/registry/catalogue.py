"""What is in a registry: builds, their versions, who holds which stage. Looking mends aliases (`stages.settled`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from dspark.config.declared import suggestion
from dspark.errors import SettingsError
from dspark.registry.chain import STAGES, Chain, Link
from dspark.registry.gate_report import Stage
from dspark.registry.register import CANDIDATE, model_name
from dspark.registry.sources import holder
from dspark.registry.stages import STAGE_TAG, registered_model, settled, versions
from dspark.registry.tracking import Registry

_PREFIX = "dspark-"


@dataclass(frozen=True)
class Holders:
    """Who holds what of one build.

    Attributes:
        candidate: the version that was published last; None: none.
        chains: the history of each stage.
        mended: what had to be set right, one line each.
    """

    build: str
    model: str
    candidate: int | None
    chains: dict[Stage, Chain]
    mended: tuple[str, ...]

    def head(self, stage: Stage) -> Link | None:
        """Who holds a stage."""
        return self.chains[stage].head

    def held_by(self, version: int) -> tuple[str, ...]:
        """What a version of the build's model holds: `candidate`, `staging`, `production`."""
        held = [CANDIDATE] if self.candidate == version else []
        return (*held, *(stage for stage in STAGES if (head := self.head(stage)) and head.source_version == version))

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        held = {stage: head.as_json() for stage in STAGES if (head := self.head(stage)) is not None}
        return {"build": self.build, "model": self.model, "candidate": self.candidate, "stages": held}


@dataclass(frozen=True)
class VersionRow:
    """One version of a build's model.

    Attributes:
        registered: when, UTC.
        holds: `candidate`, `staging`, `production`.
    """

    version: int
    package_digest: str
    registered: str
    git_commit: str
    holds: tuple[str, ...]
    tags: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def builds(registry: Registry) -> list[str]:
    """Every build of which something was published, by name."""
    return sorted(
        model.name.removeprefix(_PREFIX)
        for model in _models(registry)
        if model.name.startswith(_PREFIX) and STAGE_TAG not in model.tags
    )


def find_build(registry: Registry, name: str) -> str:
    """The build that a name means: its own, or that of its model (`dspark-<build>`).

    Raises:
        SettingsError: the registry has none; names the nearest.
    """
    for build in (name, name.removeprefix(_PREFIX)):
        model = registered_model(registry, model_name(build)) if _spelled(build) else None
        if model is not None and STAGE_TAG not in model.tags:
            return build
    known = builds(registry)
    raise SettingsError(f"no model of build {name!r} is registered", suggestion(name.removeprefix(_PREFIX), known))


def holders(registry: Registry, build: str) -> Holders:
    """Who holds the stages of a build, with aliases and marks set right.

    Raises:
        IntegrityError, SettingsError: as `stages.read_chain`.
    """
    found = {stage: settled(registry, build, stage) for stage in STAGES}
    chains = {stage: chain for stage, (chain, _) in found.items()}
    return Holders(
        build=build,
        model=model_name(build),
        candidate=holder(registry, build, chains, CANDIDATE),
        chains=chains,
        mended=tuple(line for _, mended in found.values() for line in mended),
    )


def version_rows(registry: Registry, held: Holders) -> list[VersionRow]:
    """All versions of a build's model, newest first."""
    rows = [
        VersionRow(
            version=int(found.version),
            package_digest=found.tags.get("dspark.package_digest", "unknown"),
            registered=datetime.fromtimestamp(found.creation_timestamp / 1000, UTC).isoformat(timespec="seconds"),
            git_commit=found.tags.get("dspark.git_commit", "unknown"),
            holds=held.held_by(int(found.version)),
            tags=dict(sorted(found.tags.items())),
        )
        for found in versions(registry, held.model)
    ]
    return rows[::-1]


def _models(registry: Registry) -> Iterator[Any]:
    token: str | None = None
    while True:
        page = registry.client.search_registered_models(max_results=200, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _spelled(build: str) -> bool:
    """False for what cannot be a build's name, and would upset the registry's query language."""
    from pydantic import TypeAdapter, ValidationError

    from dspark.config.models import Name

    try:
        TypeAdapter(Name).validate_python(build)
    except ValidationError:
        return False
    return True
