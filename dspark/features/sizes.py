"""What features take on disk; loads no torch, so that a plan is made at once."""

from __future__ import annotations

COMPRESSED = ("int8", "fp8")  # dtypes of storage that need scales
LAST_HIDDEN_GROUP = 64  # channels that share a scale, where the width is a multiple of it; otherwise all do

_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
_SCALE_BYTES = 4


def last_hidden_groups(width: int) -> int:
    """How many scales a compressed last hidden state of this width has."""
    return width // LAST_HIDDEN_GROUP if width % LAST_HIDDEN_GROUP == 0 else 1


def bytes_per_token(hidden_size: int, taps: int, dtype: str) -> int:
    """What a token of features takes on disk: taps, last hidden state, their scales, logsumexp and the id."""
    scales = taps + last_hidden_groups(hidden_size) if dtype in COMPRESSED else 0
    return hidden_size * (taps + 1) * _SIZES[dtype] + scales * _SCALE_BYTES + 4 + 8


def deepspec_bytes_per_token(hidden_size: int, taps: int) -> int:
    """The same of DeepSpec's target cache, for comparison: 6 + 2 d (m + 1).

    An id of 4 bytes, two masks of 1, bfloat16 taps and last hidden state (deepspec.md, section 3.2). Ours has the
    logsumexp over the whole vocabulary (4 bytes) and an id of 8 bytes instead, and scales where it is compressed.
    """
    return 6 + 2 * hidden_size * (taps + 1)
