"""The target's keys and values during decoding: one preallocated slot per row, ragged lengths, cheap rollback.

A transformers `Cache`, so that the models' own attention code runs on it. Every row starts at position 0 of its slot
(prompts are padded on the right), and rolling back rejected tokens is lowering a number: what lies beyond a row's
length is masked and written over by the next forward pass. Layers that see a window keep all positions as well, for the
same reason; the masks tell them what to see (`targets.masks`).

Rows in use come first, so that a pass reads slices instead of gathering: a row that leaves is replaced by the last one,
and a row that joins comes behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from dspark.decoding.prefixes import Counts
from dspark.decoding.ragged import Ragged


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of all layers, [slots, kv_heads, capacity, head_dim] each.

    Args:
        layers: decoder layers of the target.
        batch: slots, each of them a row in use at first.
        capacity: positions per row.
    Attributes:
        lengths: positions of each row in use, [rows].
    """

    def __init__(self, layers: int, batch: int, capacity: int) -> None:
        self.lengths: Counts = np.zeros(batch, np.int64)
        self.slots, self.capacity = batch, capacity
        self._window: _Window = _Window(self.lengths, 0, 0, torch.device("cpu"))
        super().__init__(layers=[_SlotLayer(self) for _ in range(layers)])

    def window(self, width: int, device: torch.device, *, first: int = 0) -> tuple[Tensor, Tensor]:
        """Place the next forward pass: `width` tokens after the length of each row from `first` on, B rows.

        Returns:
            position ids [B, width] and mask [B or 1, 1, width, keys], True where query i of a row sees a key: up to
            and including its own position. `keys` is the longest row's end, not the capacity.
        Raises:
            ValueError: if a row has no room.
        """
        lengths = self.lengths[first:]
        if int(lengths.max()) + width > self.capacity:
            raise ValueError(f"no room for {width} tokens after {int(lengths.max())} of {self.capacity}")
        self._window = _Window(lengths, first, width, device)
        return self._window.positions, self._window.mask

    def ragged_window(self, ragged: Ragged) -> tuple[Tensor, Tensor]:
        """Place the next forward pass of all rows, whose tokens are packed (`Ragged.pack`), behind each row's length.

        Returns:
            position ids [1, T] and mask [B, 1, Q, keys], nothing visible from places without a token. Only attention
            that takes packed queries (`targets.attention`) can do with it.
        Raises:
            ValueError: if a row has no room.
        """
        ends = self.lengths + ragged.real.sum(1).cpu().numpy()
        if int(ends.max()) > self.capacity:
            raise ValueError(f"no room up to {int(ends.max())} of {self.capacity}")
        self._window = _RaggedWindow(self.lengths, ragged)
        return self._window.positions, self._window.mask

    def advance(self, counts: Counts) -> None:
        """Keep the first `counts[b]` tokens of the last window in its row b; the others are rolled back."""
        first = self._window.first
        self.lengths = np.concatenate([self.lengths[:first], self.lengths[first:] + counts])

    def keep(self, rows: Sequence[int]) -> None:
        """Drop finished rows: row i becomes what row `rows[i]` was; `rows[i] == i` or `rows[i] >= len(rows)`."""
        for layer in self.layers:
            if not layer.is_initialized:
                continue  # it attends to what another layer keeps
            for row, source in enumerate(rows):
                if row != source:
                    end = self.lengths[source]
                    layer.keys[row, :, :end] = layer.keys[source, :, :end]
                    layer.values[row, :, :end] = layer.values[source, :, :end]
        self.lengths = self.lengths[np.asarray(rows, np.intp)]

    def join(self, count: int) -> None:
        """Take `count` empty rows in behind those in use.

        Raises:
            ValueError: if there are no slots for them.
        """
        if len(self.lengths) + count > self.slots:
            raise ValueError(f"no slots for {count} rows beside {len(self.lengths)} of {self.slots}")
        self.lengths = np.concatenate([self.lengths, np.zeros(count, np.int64)])


class _Window:
    """Where the tokens of one forward pass stand."""

    def __init__(self, lengths: Counts, first: int, width: int, device: torch.device) -> None:
        self.first = first
        self.start, self.end = int(lengths.min()), int(lengths.max()) + width
        self.rows = slice(first, first + len(lengths))
        aligned = self.start + width == self.end
        # Aligned rows (always so for one request) share one mask row and are written as one slice.
        starts = torch.from_numpy(lengths[:1] if aligned else lengths).to(device)
        placed = starts[:, None] + torch.arange(width, device=device)
        self.positions = placed.expand(len(lengths), width)
        self.mask = (torch.arange(self.end, device=device) <= placed[:, :, None])[:, None]
        self._scattered = None if aligned else torch.arange(first, self.rows.stop, device=device)[:, None]

    def write(self, slots: Tensor, states: Tensor) -> None:
        """Put states [B, heads, width, head_dim] into slots [slots, heads, capacity, head_dim]."""
        if self._scattered is None:
            slots[self.rows, :, self.start : self.end] = states
        else:
            slots[self._scattered, :, self.positions] = states.transpose(1, 2)


class _RaggedWindow(_Window):
    """The same where rows have different widths and their tokens lie one behind the other, [1, T]."""

    def __init__(self, lengths: Counts, ragged: Ragged) -> None:
        device = ragged.real.device
        starts = torch.from_numpy(lengths).to(device)
        placed = starts[:, None] + torch.arange(ragged.real.shape[1], device=device)  # [B, Q]
        self.first, self.rows = 0, slice(0, len(lengths))
        self.positions = placed[ragged.real][None]
        self.end = int(self.positions.max()) + 1
        sees = torch.arange(self.end, device=device) <= placed[:, :, None]
        self.mask = (sees & ragged.real[:, :, None])[:, None]  # a place without a token sees nothing
        self._owners = ragged.real.nonzero()[:, 0]

    def write(self, slots: Tensor, states: Tensor) -> None:
        """Put states [1, heads, T, head_dim] into slots."""
        slots[self._owners, :, self.positions[0]] = states[0].transpose(0, 1)


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's slots, allocated at the first forward pass, whose tensors tell heads, width, dtype and device."""

    is_sliding = False
    is_croppable = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate. Zeros: a masked NaN would still spoil the row, since 0 * NaN is NaN."""
        slots, capacity = self._cache.slots, self._cache.capacity
        _, heads, _, width = key_states.shape
        self.keys = key_states.new_zeros(slots, heads, capacity, width)
        self.values = value_states.new_zeros(slots, heads, capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the window's keys and values; return all up to the window's end, [B, heads, keys, head_dim]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self._cache._window
        window.write(self.keys, key_states)
        window.write(self.values, value_states)
        return self.keys[window.rows, :, : window.end], self.values[window.rows, :, : window.end]

    def get_seq_length(self) -> int:
        """The longest row of the window."""
        return int(self._cache.lengths[self._cache._window.first :].max())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys of the next pass and their offset."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Positions per row."""
        return self._cache.capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5.2x
