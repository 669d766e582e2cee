"""One pass of the target over token sequences: what its tapped layers and its head say about each token.

On a CPU each sequence passes alone, so that its features are a function of the sequence, to the bit, whoever asks for
them together with what. An accelerator would idle: there, sequences of similar length share a pass. Padding stands on
the right, where causal attention never looks, so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.errors import DataError
from dspark.features.compression import Codes, encode
from dspark.features.sizes import COMPRESSED, last_hidden_groups
from dspark.targets.loading import Target
from dspark.targets.record import TargetRecord
from dspark.targets.sampling import log_normaliser

BATCH_TOKENS = 4096
LOGITS_BYTES = 64 << 20  # float32 logits held at a time


@dataclass(frozen=True)
class Features:
    """Features of one sequence, as they are stored."""

    taps: Codes  # [S, m*d]
    last_hidden: Codes  # [S, d]
    logsumexp: Tensor  # float32 [S]; NaN where no token of the response is predicted

    def tensors(self) -> dict[str, Tensor]:
        """By the names of `store.FEATURES`."""
        parts = {
            "taps": self.taps.values,
            "taps_scales": self.taps.scales,
            "last_hidden": self.last_hidden.values,
            "last_hidden_scales": self.last_hidden.scales,
            "logsumexp": self.logsumexp,
        }
        return {name: part for name, part in parts.items() if part is not None}


def features_of(
    target: Target,
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    names: Sequence[str],
    *,
    dtype: str,
    batch_tokens: int = BATCH_TOKENS,
) -> Iterator[tuple[int, Features]]:
    """Features of sequences, each with its index, in the order in which they are computed.

    Args:
        sequences: token ids.
        names: of the sequences, for messages.
        dtype: of storage.
        batch_tokens: padded tokens per pass, on an accelerator.
    Raises:
        DataError: NaN or infinite features (the layer is named), or a sequence longer than the target takes.
    """
    lengths = [len(tokens) for tokens in sequences]
    require_lengths(target.record, names, lengths)
    alone = target.device.type == "cpu"
    for batch in [[index] for index in range(len(lengths))] if alone else plan_batches(lengths, batch_tokens):
        ids = torch.zeros(len(batch), max(lengths[index] for index in batch), dtype=torch.int64)
        for row, index in enumerate(batch):
            ids[row, : lengths[index]] = torch.as_tensor(sequences[index])
        output = target.hidden(ids.to(target.device))
        for row, index in enumerate(batch):
            own = slice(lengths[index])
            taps, last_hidden = output.taps[row, own], output.last_hidden[row, own]
            first = max(prompt_lengths[index] - 1, 0)
            logsumexp = torch.full((lengths[index],), torch.nan)
            logsumexp[first:] = _log_normalisers(target, last_hidden[first:]).cpu()
            found = Features(
                taps=encode(taps.cpu(), dtype, len(target.taps)),
                last_hidden=encode(last_hidden.cpu(), dtype, last_hidden_groups(last_hidden.shape[-1])),
                logsumexp=logsumexp,
            )
            _refuse_non_finite(target, found, first, dtype, names[index])
            yield index, found


def require_lengths(record: TargetRecord, names: Iterable[str], lengths: Iterable[int]) -> None:
    """Refuse a sequence that the target cannot take.

    Raises:
        DataError: it is empty or too long.
    """
    for name, length in zip(names, lengths, strict=True):
        if not 0 < length <= record.max_position:
            raise DataError(f"sequence {name!r} has {length} tokens; the target takes 1 to {record.max_position}")


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Which sequences share a forward pass: the longest first, as many as fit into `batch_tokens` with padding.

    Returns:
        indices into `lengths`; a sequence longer than `batch_tokens` is alone.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    for index in order:
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _log_normalisers(target: Target, last_hidden: Tensor) -> Tensor:
    """logsumexp over the whole vocabulary of the float32 cast of the target's logits, [S, d] -> float32 [S]."""
    rows = max(1, LOGITS_BYTES // (4 * target.record.vocab_physical))
    return torch.cat([log_normaliser(target.logits(chunk)) for chunk in torch.split(last_hidden, rows)])


def _refuse_non_finite(target: Target, features: Features, first: int, dtype: str, sequence: str) -> None:
    for name, values in _named(target, features, first, dtype):
        if not torch.isfinite(values).all():
            tokens = int((~torch.isfinite(values)).reshape(len(values), -1).any(-1).sum())
            raise DataError(
                f"NaN or infinity in the features: {name} of target {target.record.name!r}, {tokens} of {len(values)} "
                f"tokens of sequence {sequence!r} (stored as {dtype}, computed in {target.dtype_name})",
                "set features.dtype or the target's dtype to bfloat16 or float32",
            )


def _named(target: Target, features: Features, first: int, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """What has to be finite; of compressed numbers the scales tell."""
    scaled = dtype in COMPRESSED
    taps = features.taps.scales if scaled else features.taps.values
    last_hidden = features.last_hidden.scales if scaled else features.last_hidden.values
    if taps is None or last_hidden is None:
        raise RuntimeError(f"{dtype} has no scales")
    parts = taps.reshape(len(taps), len(target.taps), -1).unbind(1)
    for layer, part in zip(target.taps, parts, strict=True):
        yield f"the output of layer {layer}", part
    yield "the final norm", last_hidden
    yield "the logits", features.logsumexp[first:]
