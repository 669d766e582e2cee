"""`io.json`: the contract of the exported ONNX graphs. Written by `export.onnx`, read by the ONNX Runtime adapter."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dspark.config.models import Digest

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]  # in the folder of io.json
STATELESS = "draft_block.onnx"
CACHED = "draft_block_cached.onnx"
WEIGHTS = "draft_block.onnx.data"
ENDS = "target_ends.onnx.data"
IO_FILE = "io.json"


class Part(BaseModel):
    """Base of the parts: unknown keys are mistakes, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)


class TensorSpec(Part):
    """One input or output; an axis is a size or the name of a size that may vary."""

    name: str
    dtype: Literal["float32", "int64"]
    shape: tuple[int | str, ...]
    meaning: str


class GraphSpec(Part):
    """One graph and its file."""

    file: FileName
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class WeightsSpec(Part):
    """A file that holds weights of both graphs."""

    file: FileName
    bytes: int = Field(gt=0)
    sha256: Digest


class EndsPiece(Part):
    """A matrix of the target in the file of its ends: float32, row by row, at an offset; between pieces are zeros."""

    tensor: Literal["embedding", "head"]  # of the head the rows of `draft_token_ids`, where there are some
    transposed: bool
    offset: int = Field(ge=0)


class EndsSpec(WeightsSpec):
    """The file of the target's ends, and what it is put together from: whoever has the target can make it."""

    pieces: tuple[EndsPiece, ...] = ()  # by offset; none: written before this was noted


class GraphIO(Part):
    """What `io.json` says of the graphs of a drafter and of a target alike.

    Attributes:
        taps: target layers whose outputs are concatenated, in this order, into `features`.
        layers, num_key_value_heads, head_dim: of the model in the graph, whose keys and values are handed in and out.
        vocab_size: tokens that the target knows.
        embedding_digest, head_digest: of the target's tensors; another target's features mean nothing to a drafter.
    """

    opset: int
    taps: tuple[int, ...]
    tap_convention: Literal["output of layer k, counted from 0"] = "output of layer k, counted from 0"
    hidden_size: int = Field(gt=0)
    layers: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    vocab_size: int = Field(gt=0)
    max_position: int = Field(ge=1)
    mask_token_id: int = Field(ge=0)
    embedding_digest: Digest
    head_digest: Digest

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.mask_token_id >= self.vocab_size:
            raise ValueError("mask_token_id lies outside the vocabulary")
        if list(self.taps) != sorted(set(self.taps)):
            raise ValueError("taps are not ascending layer numbers")
        return self


class OnnxIO(GraphIO):
    """Everything that a runtime must know to use the graphs.

    Attributes:
        stateless: drafts the most likely tokens from the features of the whole context.
        cached: drafts, or draws, from the context's keys and values and the features of the newest positions.
        draft_token_ids: the target's id of each column of `draft_logits`; None: column = id.
        weights: the drafter's own.
        ends: the target's embedding, and the rows of its head that the drafter can propose, in float32.
    """

    schema_: Literal["dspark/onnx-io/1"] = Field(default="dspark/onnx-io/1", alias="schema")
    gamma: int = Field(ge=1)
    stateless: GraphSpec
    cached: GraphSpec
    weights: WeightsSpec
    ends: EndsSpec
    sample_from_anchor: Literal[True] = True
    draft_vocab_size: int = Field(gt=0)  # tokens that can be drafted
    draft_token_ids: tuple[int, ...] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> OnnxIO:
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError("draft_vocab_size exceeds the vocabulary")
        if self.draft_token_ids is not None:
            ids = self.draft_token_ids
            if len(ids) != self.draft_vocab_size or len(set(ids)) != len(ids) or max(ids) >= self.vocab_size:
                raise ValueError("draft_token_ids are not draft_vocab_size different tokens")
        if [piece.offset for piece in self.ends.pieces] != sorted({piece.offset for piece in self.ends.pieces}):
            raise ValueError("the pieces of the target's ends are not ascending")
        return self
