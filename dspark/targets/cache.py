"""A key-value cache for batched generation: allocated once, one column pointer for all rows.

Growing a cache by concatenation copies all of it at every step; here a step writes one column and reads views.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class ColumnLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, [B, kv heads, capacity, head_dim]; columns beyond `filled` are garbage."""

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.filled = 0
        self.window = slice(0, rows)  # rows of the running forward pass
        self._rows = rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate on the first update, when heads, width and dtype are known."""
        _, heads, _, width = key_states.shape
        self.keys = key_states.new_empty(self._rows, heads, self.capacity, width)
        self.values = value_states.new_empty(self._rows, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new columns; returns views of everything seen so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.filled + key_states.shape[2]
        self.keys[self.window, :, self.filled : end] = key_states
        self.values[self.window, :, self.filled : end] = value_states
        return self.keys[self.window, :, :end], self.values[self.window, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys of the next forward pass and their offset."""
        return self.filled + query_length, 0

    def get_seq_length(self, *args: Any) -> int:
        """Columns written."""
        return self.filled

    def get_max_length(self) -> int:
        """Columns there are."""
        return self.capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5.2x


class ColumnCache(Cache):  # type: ignore[misc]
    """A transformers cache of `ColumnLayer`s. The caller moves the column pointer with `advance`."""

    def __init__(self, layers: int, rows: int, capacity: int) -> None:
        super().__init__(layers=[ColumnLayer(rows, capacity) for _ in range(layers)])

    def advance(self, columns: int) -> None:
        """Take the last forward pass's `columns` in."""
        for layer in self.layers:
            layer.filled += columns

    def look_at(self, rows: slice) -> None:
        """Let the next forward passes concern these rows only."""
        for layer in self.layers:
            layer.window = rows

    def copy_prefix(self, single: ColumnCache) -> None:
        """Start every row with the columns of a one-row cache."""
        for layer, source in zip(self.layers, single.layers, strict=True):
            end = layer.filled = source.filled
            if not source.is_initialized:
                continue  # it attends to what another layer keeps
            layer.lazy_initialization(source.keys, source.values)
            layer.keys[:, :, :end] = source.keys[:, :, :end]
            layer.values[:, :, :end] = source.values[:, :, :end]

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these, int64 [B']."""
        for layer in self.layers:
            layer.window = slice(0, len(rows))
            if not layer.is_initialized:
                continue
            layer.keys = _rows_of(layer.keys, rows, layer.filled)
            layer.values = _rows_of(layer.values, rows, layer.filled)


def _rows_of(states: Tensor, rows: Tensor, filled: int) -> Tensor:
    kept = states.new_empty(len(rows), *states.shape[1:])
    torch.index_select(states[:, :, :filled], 0, rows, out=kept[:, :, :filled])
    return kept
