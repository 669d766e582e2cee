"""The target's keys and values during decoding: one preallocated slot per row, ragged lengths, cheap rollback.

A transformers `Cache`, so that the models' own attention code runs on it. Every row starts at position 0 of its slot
(prompts are padded on the right), and rolling back rejected tokens is lowering a number: what lies beyond a row's
length is masked and written over by the next forward pass. Layers that see a window keep all positions as well, for the
same reason; the masks tell them what to see (`targets.masks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from dspark.decoding.prefixes import Counts


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of all layers, [batch, kv_heads, capacity, head_dim] each.

    Args:
        layers: decoder layers of the target.
        batch: rows.
        capacity: positions per row.
    """

    def __init__(self, layers: int, batch: int, capacity: int) -> None:
        self.lengths: Counts = np.zeros(batch, np.int64)
        self.capacity = capacity
        self._window = _Window(np.zeros(batch, np.int64), 0, torch.device("cpu"))
        super().__init__(layers=[_SlotLayer(self) for _ in range(layers)])

    def window(self, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Place the next forward pass: `width` tokens after each row's length.

        Returns:
            position ids [B, width] and mask [B or 1, 1, width, keys], True where query i of a row sees a key: up to
            and including its own position. `keys` is the longest row's end, not the capacity.
        Raises:
            ValueError: if a row has no room.
        """
        if int(self.lengths.max()) + width > self.capacity:
            raise ValueError(f"no room for {width} tokens after {int(self.lengths.max())} of {self.capacity}")
        self._window = _Window(self.lengths, width, device)
        return self._window.positions, self._window.mask

    def advance(self, counts: Counts) -> None:
        """Keep the first `counts[b]` tokens of the last window in row b; the others are rolled back."""
        self.lengths = self.lengths + counts

    def keep(self, rows: Sequence[int]) -> None:
        """Drop finished rows: row i becomes what row `rows[i]` was; `rows[i] == i` or `rows[i] >= len(rows)`."""
        for layer in self.layers:
            if not layer.is_initialized:
                continue  # it attends to what another layer keeps
            for row, source in enumerate(rows):
                if row != source:
                    layer.keys[row] = layer.keys[source]
                    layer.values[row] = layer.values[source]
        self.lengths = self.lengths[list(rows)]


class _Window:
    """Where the tokens of one forward pass stand."""

    def __init__(self, lengths: Counts, width: int, device: torch.device) -> None:
        self.batch, self.width = len(lengths), width
        self.start, self.end = int(lengths.min()), int(lengths.max()) + width
        self.aligned = self.start + width == self.end
        # Aligned rows (always so for one request) share one mask row and are written as one slice.
        starts = torch.from_numpy(lengths[:1] if self.aligned else lengths).to(device)
        placed = starts[:, None] + torch.arange(width, device=device)
        self.positions = placed.expand(self.batch, width)
        self.mask = (torch.arange(self.end, device=device) <= placed[:, :, None])[:, None]
        self.rows = None if self.aligned else torch.arange(self.batch, device=device)[:, None]


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's slots, allocated at the first forward pass, whose tensors tell heads, width, dtype and device."""

    is_sliding = False
    is_croppable = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate. Zeros: a masked NaN would still spoil the row, since 0 * NaN is NaN."""
        batch, heads, _, width = key_states.shape
        self.keys = key_states.new_zeros(batch, heads, self._cache.capacity, width)
        self.values = value_states.new_zeros(batch, heads, self._cache.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the window's keys and values [B, heads, width, head_dim]; return all up to the window's end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self._cache._window
        batch = window.batch
        if window.rows is None:
            self.keys[:batch, :, window.start : window.end] = key_states
            self.values[:batch, :, window.start : window.end] = value_states
        else:
            self.keys[window.rows, :, window.positions] = key_states.transpose(1, 2)
            self.values[window.rows, :, window.positions] = value_states.transpose(1, 2)
        return self.keys[:batch, :, : window.end], self.values[:batch, :, : window.end]

    def get_seq_length(self) -> int:
        """The longest row."""
        return int(self._cache.lengths.max())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys of the next pass and their offset."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Positions per row."""
        return self._cache.capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5.2x
