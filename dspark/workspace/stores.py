"""Where features lie: `DSPARK_FEATURE_STORE` > `store.features` of `params.yaml` > `.dspark/store/features`.

A store outside a workspace may be shared. Each workspace that uses it leaves a note there, so that nobody's garbage
collection takes for garbage what another's manifest names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark.config.declared import Mistake, Mistakes, describe, hint_for, keys_of, read_mapping
from dspark.config.models import StoreSettings
from dspark.errors import PreflightError
from dspark.io.atomic import write_if_changed
from dspark.io.digest import digest_json
from dspark.io.jsonfile import model_json, pretty_json, read_model
from dspark.io.yamlfile import key_line
from dspark.workspace.layout import Workspace

VARIABLE = "DSPARK_FEATURE_STORE"
USERS = "users"


class User(BaseModel):
    """`users/<digest>.json` of a shared store: a workspace that uses it."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal["dspark/store-user/1"] = Field(default="dspark/store-user/1", alias="schema")
    workspace: str  # its folder


def store_settings(workspace: Workspace) -> StoreSettings:
    """`store` of `params.yaml`; its other keys are the builds' business.

    Raises:
        Mistakes: unknown keys or values out of range.
    """
    path = workspace.root / "params.yaml"
    value = (read_mapping(path, path.name).get("store") or {}) if path.is_file() else {}
    try:
        return StoreSettings.model_validate(value)
    except ValidationError as error:
        raise Mistakes(
            [
                Mistake(
                    f"{path.name}:{key_line(path, 'store', *keys_of(item, StoreSettings))}",
                    describe(item, StoreSettings, "store."),
                    hint_for(item, StoreSettings),
                )
                for item in error.errors()
            ]
        ) from None


def feature_store(workspace: Workspace, environment: Mapping[str, str] | None = None) -> Path:
    """The folder of the shards that a workspace uses.

    Args:
        environment: variables (None: this process's).
    """
    variables = os.environ if environment is None else environment
    named = variables.get(VARIABLE) or store_settings(workspace).features
    return workspace.root / Path(named).expanduser() if named else workspace.store / "features"


def join_store(workspace: Workspace) -> None:
    """Note in a store outside the workspace that the workspace uses it.

    Raises:
        PreflightError: the folder cannot be written to.
    """
    store = feature_store(workspace)
    if store.resolve().is_relative_to(workspace.root.resolve()):
        return
    user = User(workspace=str(workspace.root.resolve()))
    try:
        write_if_changed(store / USERS / f"{digest_json(user.workspace)[:16]}.json", pretty_json(model_json(user)))
    except OSError as reason:
        raise PreflightError(
            f"the feature store {store} cannot be written to: {reason.strerror}",
            f"mend its permissions, or name another as {VARIABLE} or store.features in params.yaml",
        ) from None


def users(workspace: Workspace) -> list[Workspace]:
    """All workspaces that use the feature store of this one, this one first.

    Raises:
        PreflightError: one of them is not to be found, so that nobody knows what it needs.
        DataError: a note is damaged.
    """
    found = [workspace]
    for path in sorted((feature_store(workspace) / USERS).glob("*.json")):
        root = Path(read_model(path, User, hint=f"remove it if the workspace is gone: rm {path}").workspace)
        if root == workspace.root.resolve():
            continue
        if not (root / "dvc.yaml").is_file():
            raise PreflightError(
                f"the feature store is shared with the workspace {root}, which cannot be seen from here",
                f"run this where it can, or, if that workspace is gone for good: rm {path}",
            )
        found.append(Workspace(root))
    return found
