"""Which tracking server: flag > `DSPARK_TRACKING_URI` > `MLFLOW_TRACKING_URI` > `params.yaml` > the workspace's own.

An address is absolute and complete; what it holds of a password is never shown, stored or compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ValidationError

from dspark.config.declared import Mistake, Mistakes, describe, hint_for, keys_of, read_mapping
from dspark.config.models import TrackingSettings
from dspark.errors import SettingsError
from dspark.io.yamlfile import key_line
from dspark.registry.reach import shown
from dspark.registry.receipts import default_uri, sqlite_file

VARIABLES = ("DSPARK_TRACKING_URI", "MLFLOW_TRACKING_URI")
# What MLflow speaks to without further programs: its servers, and the databases that SQLAlchemy has dialects for.
_SERVERS = ("http", "https")
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_HINT = "for instance https://mlflow.example.org, postgresql://user@host/mlflow or sqlite:////folder/mlflow.db"


def tracking_address(workspace: Path, flag: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """The address of the tracking server of a workspace.

    Args:
        workspace: its folder; `params.yaml` may name the server (`tracking: {uri: ...}`).
        flag: `--tracking-uri`.
        environment: variables (None: none).
    Raises:
        SettingsError: an address that is relative or of no kind that is known; names where it comes from.
    """
    if flag is not None:
        return checked(flag, "--tracking-uri")
    for name in VARIABLES:
        if value := (environment or {}).get(name):
            return checked(value, name)
    path = workspace / "params.yaml"
    settings = _settings(path) if path.is_file() else TrackingSettings()
    if settings.uri is not None:
        return checked(settings.uri, f"params.yaml:{key_line(path, 'tracking', 'uri')}")
    return default_uri(workspace)


def checked(address: str, where: str) -> str:
    """An address that can work, without a slash at its end.

    Args:
        where: it comes from, for the message.
    Raises:
        SettingsError: it is relative or of no kind that is known.
    """
    scheme, _, rest = address.partition("://")
    database = sqlite_file(address)
    if database is not None and not database.is_absolute():
        raise SettingsError(f"{where}: tracking address {address!r} follows the current folder", _HINT)
    if scheme.partition("+")[0] not in (*_SERVERS, *_DATABASES) or not rest:
        raise SettingsError(f"{where}: {shown(address)!r} is no address of a tracking server", _HINT)
    if scheme in _SERVERS and not urlsplit(address).hostname:
        raise SettingsError(f"{where}: tracking address {shown(address)!r} names no host", _HINT)
    return address.rstrip("/")


def _settings(path: Path) -> TrackingSettings:
    """`tracking` of `params.yaml`; its other keys are the builds' business."""
    value = read_mapping(path, path.name).get("tracking") or {}
    try:
        return TrackingSettings.model_validate(value)
    except ValidationError as error:
        raise Mistakes(
            [
                Mistake(
                    f"{path.name}:{key_line(path, 'tracking', *keys_of(item, TrackingSettings))}",
                    describe(item, TrackingSettings, "tracking."),
                    hint_for(item, TrackingSettings),
                )
                for item in error.errors()
            ]
        ) from None
