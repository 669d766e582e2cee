"""The drafter inside a DeepSeek-V4 target (Flash, Pro, V4.1): what the target's `config.json` says of it.

The keys `dspark_*` and their meaning are those by which SGLang 0.5.23 and vLLM 0.32.0 find such a drafter
(engine-formats.md, 1.1, 1.6 and 2.2). Its weights are part of the target's own checkpoint: stages whose tensors are
called `mtp.N.`. Nothing here runs it.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dspark.drafters.dialects import BUNDLED
from dspark.errors import DataError
from dspark.io.jsonfile import validation_text

PREFIX = "mtp."


class BundledDrafter(BaseModel):
    """A drafter and the target that it is part of.

    Attributes:
        gamma: block size; a verification step sees one token more.
        target_layer_ids: as the target's config says; engines disagree by release whether these name the outputs of the
            layers (V4) or their inputs (V4.1), and need not be told.
        keys: everything that the config says under `dspark_*`, word for word.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    architecture: str
    model_type: str | None = None
    gamma: int = Field(ge=1)
    markov_rank: int = Field(ge=1)
    mask_token_id: int = Field(ge=0)
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    hidden_size: int | None = None
    target_layers: int | None = None
    vocab_size: int | None = None
    max_position: int | None = None
    quantisation: str | None = None
    keys: dict[str, Any]

    @model_validator(mode="after")
    def _possible(self) -> BundledDrafter:
        if self.vocab_size is not None and self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"dspark_noise_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}"
            )
        if self.target_layers is not None and max(self.target_layer_ids) >= self.target_layers:
            raise ValueError(
                f"dspark_target_layer_ids {list(self.target_layer_ids)} leave the target's {self.target_layers} layers"
            )
        return self

    @property
    def tensor_prefix(self) -> str:
        """How the names of its tensors begin."""
        return PREFIX


def bundled_drafter(value: dict[str, Any], where: str) -> BundledDrafter:
    """The drafter that a target's `config.json` says it brings along.

    Raises:
        DataError: it brings none, or says what cannot be.
    """
    if absent := [key for key in BUNDLED if value.get(key) is None]:
        some = "no DSpark drafter in it" if len(absent) == len(BUNDLED) else "its DSpark drafter is described in part"
        raise DataError(
            f"{where}: {some}: {', '.join(absent)} missing",
            "name the release of the target that has its drafter inside",
        )
    quantisation = value.get("quantization_config")
    try:
        return BundledDrafter(
            architecture=value["architectures"][0],
            model_type=value.get("model_type"),
            gamma=value["dspark_block_size"],
            markov_rank=value["dspark_markov_rank"],
            mask_token_id=value["dspark_noise_token_id"],
            target_layer_ids=value["dspark_target_layer_ids"],
            hidden_size=value.get("hidden_size"),
            target_layers=value.get("num_hidden_layers"),
            vocab_size=value.get("vocab_size"),
            max_position=value.get("max_position_embeddings"),
            quantisation=quantisation.get("quant_method") if isinstance(quantisation, dict) else None,
            keys={key: inner for key, inner in sorted(value.items()) if key.startswith("dspark_")},
        )
    except ValidationError as reason:
        raise DataError(f"{where}: {validation_text(reason)}") from None
