"""The target record: what a target is, exactly, on this machine (`targets/<name>.json`).

Stages depend on the record, never on the weights: it holds the digest of everything that decides what the target
says, and the weights lie in `.dspark/store/targets/<digest>/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dspark.config.models import Digest, DType, HubSource, Name, Sampling, TargetSpec
from dspark.io.jsonfile import read_model

STORE = Path(".dspark/store/targets")  # relative to the workspace


class TargetRecord(BaseModel):
    """A materialised target. Ids are token ids, taps are 0-based layers whose *output* is tapped."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)

    schema_: Literal["dspark/target/1"] = Field(default="dspark/target/1", alias="schema")
    name: Name
    source: dict[str, Any]  # as declared; a folder's path is left out, it means nothing on another machine
    revision: str  # what the source resolved to: a commit, a wheel's version and file digest, a digest of the files
    public_id: str | None = None
    digest: Digest  # of all files and the dtype; names the store folder
    weights_digest: Digest
    embedding_digest: Digest  # of the tensor in the target's dtype (`targets.loading.tensor_digest`)
    head_digest: Digest
    tokenizer_digest: Digest
    chat_template_digest: Digest
    dtype: DType
    quantisation: str | None = None  # of the weights as published; the stored ones are always dense
    model_type: str
    architecture: str
    text_config: dict[str, Any]
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    vocab_logical: int = Field(gt=0)  # ids that the tokenizer knows
    vocab_physical: int = Field(gt=0)  # rows of the embedding
    max_position: int = Field(gt=0)
    taps: tuple[int, ...] = Field(min_length=1)
    mask_token_id: int = Field(ge=0)
    eos_token_ids: tuple[int, ...] = Field(min_length=1)
    sampling: Sampling = Sampling()
    thinking_mode: Literal["none", "off", "on"] = "none"

    @model_validator(mode="after")
    def _consistent(self) -> TargetRecord:
        reason = taps_mistake(self.taps, self.num_layers)
        if reason:
            raise ValueError(reason)
        if self.vocab_logical > self.vocab_physical:
            raise ValueError(f"the tokenizer knows {self.vocab_logical} ids, the embedding has {self.vocab_physical}")
        for token in (self.mask_token_id, *self.eos_token_ids):
            if not 0 <= token < self.vocab_physical:
                raise ValueError(f"token id {token} is outside the vocabulary of {self.vocab_physical}")
        if self.mask_token_id in self.eos_token_ids:
            raise ValueError(f"mask_token_id {self.mask_token_id} is an end-of-sequence token")
        return self

    def folder(self, root: Path) -> Path:
        """Where the target's files lie in the workspace `root`."""
        return root / STORE / self.digest


def read_record(path: Path) -> TargetRecord:
    """Read `targets/<name>.json`.

    Raises:
        DataError: missing, or not a record.
    """
    return read_model(path, TargetRecord, hint=f"dspark targets fetch {path.stem}")


def public_source(spec: TargetSpec) -> dict[str, Any]:
    """The source as declared, without a local path."""
    return spec.source.model_dump(mode="json", exclude={"path"})


def public_id(spec: TargetSpec) -> str | None:
    """What others call the target; None for a local folder that was given no such name."""
    return spec.public_id or (spec.source.repo if isinstance(spec.source, HubSource) else None)


def spread_taps(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """Evenly spread taps: round(1 + i (L - 4) / (n - 1)), i = 0..n-1 (deepspec.md, sections 4.2 and 6).

    Qwen3 with 36 layers: 1, 9, 17, 25, 33. The last is layer L - 3. A target too shallow for `count` different taps
    gets one tap per layer up to L - 3, and one of fewer than five layers all but its last.

    Args:
        num_layers: L.
        count: n >= 2.
    Raises:
        ValueError: fewer than two layers (the last one is never tapped).
    """
    if num_layers < 2:
        raise ValueError("a target of fewer than two layers has no layer to tap: the last is never tapped")
    if num_layers < 5:
        return tuple(range(num_layers - 1))
    return tuple(sorted({round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)}))


def taps_mistake(taps: tuple[int, ...], num_layers: int) -> str | None:
    """What is wrong with `taps`, or None."""
    if list(taps) != sorted(set(taps)):
        return f"taps must ascend without repeats, they are {list(taps)}"
    if taps and (taps[0] < 0 or taps[-1] >= num_layers):
        return f"taps {list(taps)} leave the target's {num_layers} layers (0 to {num_layers - 1})"
    if taps and taps[-1] == num_layers - 1:
        return f"the last layer ({num_layers - 1}) cannot be tapped: some engines hand out its output normed, some raw"
    return None
