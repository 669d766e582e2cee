"""Token sequences: a prompt and the target's own answer, with the loss on the answer alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark.errors import DataError
from dspark.io.jsonfile import validation_text
from dspark.io.jsonlines import read_jsonlines

TokenId = Annotated[int, Field(ge=0)]


class ResponseRow(BaseModel):
    """A row of `responses/<split>.jsonl`: exact token ids, nothing decoded and encoded again."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str = Field(min_length=1)  # the prompt's
    sample: int = Field(ge=0)  # which of the answers to this prompt
    domain: str = Field(min_length=1)
    prompt_ids: list[TokenId] = Field(min_length=1)
    response_ids: list[TokenId] = Field(min_length=1)  # the end-of-sequence token included if the target stopped
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and one answer as one row of token ids.

    Args:
        id: `<prompt id>#<sample>`, unique in a split.
        domain: name of the domain.
        token_ids: prompt, then response; [S].
        prompt_length: number of prompt tokens.
        finish_reason: `stop` (the target ended its turn) or `length` (it was cut off).
    """

    id: str
    domain: str
    token_ids: list[int]
    prompt_length: int
    finish_reason: str

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """True where a token is the target's own, [S]: positions >= prompt_length."""
        return np.arange(len(self.token_ids)) >= self.prompt_length


def read_sequences(path: Path) -> list[TokenSequence]:
    """Read `responses/<split>.jsonl`.

    Raises:
        DataError: missing or damaged, or the same sample of a prompt twice; file and line are named.
    """
    sequences: list[TokenSequence] = []
    lines: dict[str, int] = {}
    for number, value in enumerate(read_jsonlines(path), start=1):
        try:
            row = ResponseRow.model_validate(value)
        except ValidationError as error:
            raise DataError(f"{path}:{number}: {validation_text(error)}", "make it again with `dspark run`") from None
        name = f"{row.id}#{row.sample}"
        if lines.setdefault(name, number) != number:
            raise DataError(
                f"{path}:{number}: sample {row.sample} of prompt {row.id!r} already stands on line {lines[name]}",
                "make it again with `dspark run`",
            )
        sequences.append(
            TokenSequence(
                id=name,
                domain=row.domain,
                token_ids=[*row.prompt_ids, *row.response_ids],
                prompt_length=len(row.prompt_ids),
                finish_reason=row.finish_reason,
            )
        )
    return sequences
