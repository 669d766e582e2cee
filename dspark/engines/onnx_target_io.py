"""`io.json` of a target that was exported as ONNX: what a runtime without torch must know to decode with it.

Written by `export.onnx_target`, read by programs that know nothing of dspark (`examples/onnxruntime`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dspark.engines.onnx_io import FileName, GraphIO, GraphSpec, Part, WeightsSpec

TARGET = "target.onnx"
TARGET_WEIGHTS = "target.onnx.data"
TOKENIZER = "tokenizer.json"


class ChatText(Part):
    """What the target's chat template puts around the text of a single user message.

    The whole is tokenised at once, without special tokens of the tokenizer's own. A text that spells one of the
    tokenizer's control tokens would be read as that token.
    """

    before: str
    after: str


class TargetComparison(Part):
    """The exported graph beside the target in torch, both in float32.

    `near_ties` counts greedy tokens that differ where torch's own lead was below `tie_margin`; they are no difference.
    """

    prompts: int
    positions: int
    max_logit_difference: float
    logit_tolerance: float
    max_feature_difference: float  # relative to the largest feature of the position
    feature_tolerance: float
    greedy_tokens: int
    differing_tokens: int
    near_ties: int
    tie_margin: float
    verdict: Literal["equal", "different"]
    first_difference: str | None = None


class OnnxTargetIO(GraphIO):
    """Everything that a runtime must know to decode with the graph.

    Attributes:
        name, public_id, revision: what the target is.
        graph: reads tokens behind the context whose keys and values are handed in.
        weights: float32, of the whole target.
        eos_token_ids: any of them ends the target's turn.
        tokenizer: of the `tokenizers` library; None: the target has none of that kind.
        chat: None: without tokenizer, or the template does more than put two strings around a message.
        compared: with torch, when it was written.
    """

    schema_: Literal["dspark/onnx-target-io/1"] = Field(default="dspark/onnx-target-io/1", alias="schema")
    name: str
    public_id: str | None = None
    revision: str
    graph: GraphSpec
    weights: WeightsSpec
    eos_token_ids: tuple[int, ...] = Field(min_length=1)
    tokenizer: FileName | None = None
    chat: ChatText | None = None
    compared: TargetComparison

    @model_validator(mode="after")
    def _consistent(self) -> OnnxTargetIO:
        if max(self.eos_token_ids) >= self.vocab_size:
            raise ValueError("an end of sequence lies outside the vocabulary")
        if self.taps[-1] >= self.layers:
            raise ValueError("taps name layers that the target does not have")
        if self.chat is not None and self.tokenizer is None:
            raise ValueError("chat is given without a tokenizer")
        return self
