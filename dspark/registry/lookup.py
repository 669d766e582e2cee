"""Which version of a registered model an address means, and where its artifacts lie.

A server is asked by its REST API, without mlflow. A database (`sqlite:///...`, `postgresql://...`) is read with mlflow,
which `dspark[pipeline]` installs. Who holds a stage follows from its history (`dspark.registry.chain`), not from the
alias, which an interrupted promotion or a hand may have left elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from dspark.errors import PreflightError, ServiceError, SettingsError
from dspark.registry.chain import STAGES, chain_of, read_link, stage_model
from dspark.registry.receipts import sqlite_file
from dspark.registry.server import AbsentError, TrackingServer

SIGNATURE_TAG = "dspark.signature"  # base64 of `manifest.sig`, for a package that was signed after it was published
_ADDRESS = re.compile(r"models:/(?P<name>[^/:@\s][^/:@]*)(?:@(?P<alias>[A-Za-z0-9_-]+)|/(?P<number>[1-9][0-9]{0,8}))")
_MODELS, _VERSIONS = "mlflow/registered-models", "mlflow/model-versions"


@dataclass(frozen=True)
class Version:
    """A registered version.

    Attributes:
        artifacts: address of its artifacts, in whatever store.
    """

    name: str
    number: str
    artifacts: str
    tags: Mapping[str, str]


def find_version(address: str, tracking_uri: str) -> Version:
    """The version that `models:/NAME@ALIAS` or `models:/NAME/VERSION` stands for now.

    Raises:
        SettingsError: not such an address, or the registry knows no such model, alias or version.
        PreflightError: the registry is a database, and mlflow is not installed.
        ServiceError: the registry cannot be asked.
    """
    name, alias, number = parse_address(address)
    try:
        if is_server(tracking_uri):
            return _asked(TrackingServer(tracking_uri), name, alias, number)
        return _read(tracking_uri, name, alias, number)
    except AbsentError as reason:
        raise SettingsError(f"{address} is not in the registry: {reason}", "dspark registry list") from None


def set_tag(version: Version, key: str, value: str, tracking_uri: str) -> None:
    """Set a tag of a version; raises as `find_version`."""
    if is_server(tracking_uri):
        body = {"name": version.name, "version": version.number, "key": key, "value": value}
        TrackingServer(tracking_uri).tell(f"{_VERSIONS}/set-tag", body)
        return
    from dspark.registry.tracking import opened

    _require_database(tracking_uri)
    with opened(tracking_uri) as registry:
        registry.client.set_model_version_tag(version.name, version.number, key, value)


def parse_address(address: str) -> tuple[str, str | None, str | None]:
    """(name, alias, number) of an address; one of the last two is None.

    Raises:
        SettingsError: it is none.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise SettingsError(
            f"{address!r} is no address of a registered package",
            "give one such as models:/dspark-qwen3-8b@production or models:/dspark-qwen3-8b/3",
        )
    return match["name"], match["alias"], match["number"]


def is_server(tracking_uri: str) -> bool:
    """True if the registry is asked over HTTP."""
    return tracking_uri.startswith(("http://", "https://"))


def _promoted(stage: str, versions: Iterable[tuple[int, Mapping[str, str]]]) -> str | None:
    """The version of the build's model that holds a stage; None: nothing was promoted.

    Args:
        stage: the model of its history.
        versions: number and tags of all of that model's versions.
    Raises:
        IntegrityError: tags of a promotion were changed by hand.
    """
    links = (read_link(stage, number, tags) for number, tags in versions)
    head = chain_of(stage, [link for link in links if link is not None]).head
    return None if head is None else str(head.source_version)


def _stage_of(name: str, alias: str | None) -> str | None:
    """The model that holds the history of an alias, if it is a stage's."""
    build = name.removeprefix("dspark-")
    stage = next((stage for stage in STAGES if stage == alias), None)
    return stage_model(build, stage) if stage is not None and build != name else None


def _listed(server: TrackingServer, model: str) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Number and tags of all versions of a model that a server knows."""
    query = {"filter": f"name = '{model}'", "max_results": "200", "order_by": "version_number ASC"}
    while True:
        answer = server.ask(f"{_VERSIONS}/search", query)
        for found in answer.get("model_versions", []):
            yield int(found["version"]), _tags(found)
        if not answer.get("next_page_token"):
            return
        query["page_token"] = answer["next_page_token"]


def _tags(found: Mapping[str, Any]) -> dict[str, str]:
    return {str(tag["key"]): str(tag.get("value", "")) for tag in found.get("tags", [])}


def _asked(server: TrackingServer, name: str, alias: str | None, number: str | None) -> Version:
    if stage := _stage_of(name, alias):
        try:
            number = _promoted(stage, _listed(server, stage))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise server.failure(f"it does not say what the versions of {stage} are") from None
    if number is None:
        answer = server.ask(f"{_MODELS}/alias", {"name": name, "alias": alias or ""})
    else:
        answer = server.ask(f"{_VERSIONS}/get", {"name": name, "version": number})
    try:
        found = answer["model_version"]
        number = str(found["version"])
        tags = _tags(found)
        place = server.ask(f"{_VERSIONS}/get-download-uri", {"name": name, "version": number})["artifact_uri"]
    except (KeyError, TypeError, AttributeError):
        raise server.failure(f"it does not say what version {number} of {name} is") from None
    return Version(name, number, str(place), tags)


def _read(tracking_uri: str, name: str, alias: str | None, number: str | None) -> Version:
    _require_database(tracking_uri)
    from dspark.registry.stages import versions
    from dspark.registry.tracking import opened

    with opened(tracking_uri) as registry:
        absent = registry.mlflow.exceptions.MlflowException
        try:
            if stage := _stage_of(name, alias):
                number = _promoted(stage, ((int(one.version), one.tags) for one in versions(registry, stage)))
            if number is None:
                found: Any = registry.client.get_model_version_by_alias(name, alias or "")
            else:
                found = registry.client.get_model_version(name, number)
            place = registry.client.get_model_version_download_uri(name, str(found.version))
        except absent as reason:
            if reason.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            raise AbsentError(str(reason).strip()) from None
        return Version(name, str(found.version), _moved(str(place), registry.artifacts), dict(found.tags))


def _require_database(tracking_uri: str) -> None:
    """Refuse what mlflow would make anew, or could not read.

    Raises:
        PreflightError, ServiceError: as it says.
    """
    if find_spec("mlflow") is None:
        raise PreflightError(
            f"{tracking_uri.partition(':')[0]} registries are read with mlflow, which is not installed here",
            "give the address of a tracking server (https://...), or: pip install 'dspark[pipeline]'",
        )
    database = sqlite_file(tracking_uri)
    if database is not None and not database.is_file():
        raise ServiceError(f"{database}: there is no such registry", "give the right one with --tracking-uri")


def _moved(place: str, artifacts: Path | None) -> str:
    """Where a model lies now, in a workspace that was moved since: MLflow keeps absolute addresses."""
    parts = urlsplit(place)
    if artifacts is None or parts.scheme not in ("", "file") or Path(unquote(parts.path)).exists():
        return place
    match = re.search(r"/models/(m-[0-9a-f]{32})/artifacts/?$", parts.path)
    here = artifacts / "models" / match[1] / "artifacts" if match else None
    return here.as_uri() if here is not None and here.is_dir() else place
