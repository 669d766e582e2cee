"""The package that a retraining goes on from: in production, or named; brought into the store and verified."""

from __future__ import annotations

from pathlib import Path

from dspark.errors import PreflightError, SettingsError
from dspark.io.progress import Progress
from dspark.package.manifest import Manifest
from dspark.package.verify import read_manifest
from dspark.registry.publish import model_name
from dspark.registry.receipts import sqlite_file
from dspark.workspace.layout import Workspace
from dspark.workspace.packages import is_sound, keep_package

PRODUCTION = "production"


class NothingInProduction(PreflightError):
    """The registry could be asked, and nothing holds production; its hint is about training on."""


def fetch_champion(
    workspace: Workspace, build: str, source: str | None, *, tracking_uri: str, progress: Progress | None = None
) -> Manifest:
    """Have the champion's package in the store; nothing is fetched that lies there whole.

    Args:
        build: whose production is meant.
        source: another package than the one in production: a folder, or `models:/NAME@ALIAS` and the like.
        tracking_uri: of the registry.
    Returns:
        its manifest; it lies in `workspace.package(manifest.digests.package_digest)`.
    Raises:
        NothingInProduction: as it says.
        PreflightError: software that reads the registry, or room for the package, is missing; another process fetches.
        SettingsError: `source` is neither a folder nor such an address, or the registry does not know it.
        IntegrityError: the package is not what it should be.
        ServiceError: the registry does not answer.
    """
    if source is not None and not source.startswith("models:"):
        folder = Path(source).expanduser()
        if not folder.is_dir():
            raise SettingsError(
                f"--from {source}: there is no such folder", "name a package's folder, or models:/NAME@ALIAS"
            )
        return keep_package(workspace, folder)
    progress = progress or Progress()
    if source is not None:
        return _fetch(workspace, source, tracking_uri, progress)
    address = f"models:/{model_name(build)}@{PRODUCTION}"
    database = sqlite_file(tracking_uri)
    if database is not None and not database.is_file():
        raise _nothing_in_production(build, f"{database}: there is no registry yet")
    try:
        return _fetch(workspace, address, tracking_uri, progress)
    except SettingsError as error:  # the address is ours, so it is the registry that has no such thing
        raise _nothing_in_production(build, error.message) from None


def _fetch(workspace: Workspace, address: str, tracking_uri: str, progress: Progress) -> Manifest:
    from dspark.registry.lookup import find_version
    from dspark.registry.pull import pull

    version = find_version(address, tracking_uri)
    digest = version.tags.get("dspark.package_digest")
    if digest is None:
        raise SettingsError(f"{address} is no package of dspark's", "dspark registry list")
    folder = workspace.package(digest)
    if folder.is_dir() and is_sound(folder, digest):
        return read_manifest(folder)
    # By its number: the alias may move while files are fetched.
    return pull(
        f"models:/{version.name}/{version.number}",
        folder,
        tracking_uri=tracking_uri,
        digest=digest,
        progress=progress,
    )


def _nothing_in_production(build: str, why: str) -> NothingInProduction:
    model = model_name(build)
    return NothingInProduction(
        f"build {build!r}: nothing is in production, so there is no drafter to go on from ({why})",
        f"make a first one: dspark run --build {build}, then dspark promote {model} --to production\n"
        "or go on from a package that is in a folder: --from FOLDER",
    )
