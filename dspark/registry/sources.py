"""The registered versions that a promotion starts from, and their packages as the registry holds them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dspark.errors import IntegrityError, SettingsError
from dspark.io.progress import Progress
from dspark.registry.chain import Chain
from dspark.registry.gate_report import Stage
from dspark.registry.pull import pull
from dspark.registry.register import model_name
from dspark.registry.stages import registered_model
from dspark.registry.tracking import Registry


def source_version(
    registry: Registry, build: str, chains: Mapping[Stage, Chain], version: int | None, alias: str
) -> Any:
    """A version of a build's model, by number or by what holds an alias.

    Args:
        chains: the history of each stage, which says who holds it; other aliases are what the registry says.
        version: its number; None: whoever holds `alias`.
    Raises:
        SettingsError: there is none.
        IntegrityError: dspark did not register it.
    """
    model = model_name(build)
    listing = f"all versions: dspark registry show {build}"
    if version is None:
        version = holder(registry, build, chains, alias)
        if version is None:
            raise SettingsError(f"{model}: no version holds {alias}", f"give --version N; {listing}")
    found = version_of(registry, model, version)
    if found is None:
        raise SettingsError(f"{model} has no version {version}", listing)
    if "dspark.package_digest" not in found.tags:
        raise IntegrityError(f"{model} version {version} names no package: dspark did not register it", listing)
    return found


def holder(registry: Registry, build: str, chains: Mapping[Stage, Chain], alias: str) -> int | None:
    """The version of a build's model that holds an alias, or None."""
    for stage, chain in chains.items():
        if alias == stage:
            return chain.head.source_version if chain.head else None
    model = registered_model(registry, model_name(build))
    named = model.aliases.get(alias) if model is not None else None
    return None if named is None else int(named)


def version_of(registry: Registry, model: str, version: int) -> Any | None:
    """A version of a registered model, or None if it is not there or was deleted."""
    found = registry.client.search_model_versions(f"name = '{model}' and version_number = {version}")
    return next(iter(found), None)


@contextmanager
def fetched(registry: Registry, source: Any, scratch: Path, progress: Progress) -> Iterator[Path]:
    """The package of a version as the registry holds it, verified against the digests that it was registered with.

    Args:
        source: the version.
        scratch: a folder in which the package lies meanwhile.
        progress: asked for a stop between files.
    Raises:
        IntegrityError: the registry holds something else.
        PreflightError, ServiceError, Interrupted: it could not be fetched.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="promote-") as folder:
        package = Path(folder) / "package"
        address = f"models:/{source.name}/{source.version}"
        # The digest of everything, so that evidence cannot be swapped under an unchanged package.
        digest = source.tags.get("dspark.self_digest", source.tags["dspark.package_digest"])
        pull(address, package, tracking_uri=registry.uri, digest=digest, progress=_Quiet(progress))
        yield package


class _Quiet(Progress):
    """Stops where the outer work would stop, and shows nothing of its own."""

    def __init__(self, outer: Progress) -> None:
        self._outer = outer

    def advance(self, count: int = 1, **fields: Any) -> None:
        """A safe point."""
        self._outer.advance(0)
