"""How a TensorRT plan of the drafter is built: the recipe that a package holds, and the record beside a built plan.

A plan runs on one kind of GPU and one version of TensorRT only, so no package holds one: the serving machine builds it.
Models only; nothing of TensorRT is needed to read them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dspark.config.models import Digest
from dspark.engines.onnx_io import FileName, OnnxIO, Part, TensorSpec

RECIPE = "build.json"


class AxisRange(Part):
    """Sizes that a varying axis may have in a plan, and the one that it is tuned for."""

    smallest: int = Field(ge=1)
    tuned: int = Field(ge=1)
    largest: int = Field(ge=1)

    @model_validator(mode="after")
    def _ascending(self) -> AxisRange:
        if not self.smallest <= self.tuned <= self.largest:
            raise ValueError("sizes must not fall: smallest, tuned, largest")
        return self


class Recipe(Part):
    """`engines/tensorrt/build.json`."""

    schema_: Literal["dspark/tensorrt-recipe/1"] = Field(default="dspark/tensorrt-recipe/1", alias="schema")
    graph: FileName  # in the package's engines/onnxruntime
    files: dict[FileName, Digest]  # of the graph and its weights
    opset: int
    precision: Literal["float32"] = "float32"  # of the graph's own types, which the plan keeps; no TF32
    gamma: int = Field(ge=1)
    axes: dict[str, AxisRange]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @model_validator(mode="after")
    def _whole(self) -> Recipe:
        varying = {axis for item in self.inputs for axis in item.shape if isinstance(axis, str)}
        if varying != set(self.axes):
            raise ValueError(f"ranges are given for {sorted(self.axes)}, the inputs vary in {sorted(varying)}")
        if self.graph not in self.files:
            raise ValueError(f"{self.graph} has no digest")
        return self

    def shapes(self, item: TensorSpec) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Smallest, tuned and largest shape of an input."""
        kinds = ("smallest", "tuned", "largest")
        smallest, tuned, largest = (
            tuple(axis if isinstance(axis, int) else int(getattr(self.axes[axis], kind)) for axis in item.shape)
            for kind in kinds
        )
        return smallest, tuned, largest


class TimingCache(Part):
    """What the builder measured, kept for the next build; without a GPU there is nothing to measure."""

    file: FileName
    bytes: int
    sha256: Digest


class Plan(Part):
    """`plan.json` beside a built plan."""

    schema_: Literal["dspark/tensorrt-plan/1"] = Field(default="dspark/tensorrt-plan/1", alias="schema")
    package_digest: Digest
    recipe_sha256: Digest
    builder: str  # tensorrt or tensorrt_rtx
    builder_version: str
    compute_capability: str  # such as 8.9
    precision: Literal["float32"]
    axes: dict[str, AxisRange]
    layers: int  # of the parsed network
    plan: FileName
    plan_bytes: int
    plan_sha256: Digest
    timing_cache: TimingCache | None = None
    built_seconds: float
    run: Literal["never"] = "never"  # building proves that the graph is taken whole, not what the plan computes


def make_recipe(
    io: OnnxIO, files: dict[str, str], *, batch: tuple[int, int, int], context: tuple[int, int, int]
) -> Recipe:
    """The recipe for the stateless graph.

    Args:
        io: of the exported graphs.
        files: sha256 of the graph and its weights.
        batch, context: smallest, tuned and largest size of these axes; cut to what the drafter can hold.
    """
    room = io.max_position
    return Recipe(
        graph=io.stateless.file,
        files=files,
        opset=io.opset,
        gamma=io.gamma,
        axes={
            "batch": AxisRange(smallest=batch[0], tuned=batch[1], largest=batch[2]),
            "context": AxisRange(
                smallest=min(context[0], room), tuned=min(context[1], room), largest=min(context[2], room)
            ),
        },
        inputs=io.stateless.inputs,
        outputs=io.stateless.outputs,
    )
