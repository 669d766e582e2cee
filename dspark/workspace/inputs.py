"""The two generated files that DVC and the stages read: `.dspark/dag.json` and `.dspark/inputs/<stage>/<key>.json`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark.config.models import Settings
from dspark.config.stages import BY_NAME, inputs_path
from dspark.errors import PreflightError
from dspark.io.atomic import write_if_changed
from dspark.io.jsonfile import model_json, pretty_json, read_json, read_model, validation_text
from dspark.workspace.layout import Workspace

AGAIN = "write it again: dspark plan --target NAME"


class StageInputs(BaseModel):
    """Exactly the settings that one stage reads, and the digest of the code that it can reach."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal["dspark/stage-inputs/1"] = Field(default="dspark/stage-inputs/1", alias="schema")
    stage: str
    key: str
    settings: dict[str, Any]
    code: str


def write_inputs(workspace: Workspace, stage: str, key: str, settings: Settings, code: str) -> bool:
    """Write the inputs of one stage unless they are the same already.

    Returns:
        True if something changed.
    """
    inputs = StageInputs(stage=stage, key=key, settings=settings.model_dump(mode="json"), code=code)
    return write_if_changed(workspace.root / inputs_path(stage, key), pretty_json(model_json(inputs)))


def read_inputs(workspace: Workspace, stage: str, key: str) -> tuple[StageInputs, Settings]:
    """The inputs of one stage, as written and as typed settings.

    Raises:
        PreflightError: missing, damaged, or written by another version.
    """
    path = workspace.root / inputs_path(stage, key)
    inputs = read_model(path, StageInputs, PreflightError, AGAIN)
    try:
        return inputs, BY_NAME[stage].inputs.model_validate(inputs.settings)
    except ValidationError as error:
        raise PreflightError(f"{path}: {validation_text(error)}", AGAIN) from None


def read_entry(workspace: Workspace, stage: str, key: str) -> dict[str, str]:
    """The fields of one instance of a stage in `.dspark/dag.json`.

    Raises:
        PreflightError: the file is missing, or has no such entry.
    """
    table = read_json(workspace.dag, PreflightError, AGAIN).get(BY_NAME[stage].per, {})
    if key not in table:
        known = ", ".join(sorted(table)) or "none"
        raise PreflightError(f"{workspace.dag}: no {stage} stage for {key!r} (there are: {known})", AGAIN)
    entry: dict[str, str] = table[key]
    return entry
