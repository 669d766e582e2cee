"""Keys and values of the context, kept between blocks.

A row's context only ever grows by verified positions; rows grow by different counts, so each has its own length. Rows
in use come first: of more rows than there are lengths, the others wait for sequences that begin later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.drafters.config import DrafterConfig
from dspark.errors import SettingsError


@dataclass
class ContextCache:
    """Preallocated keys and values of every draft layer.

    Attributes:
        keys, values: one per layer, [rows, kv, capacity, hd] with B rows in use; keys are normed and rotated.
        lengths: context positions of each row, int64 [B]; also the position of the row's next anchor.
    """

    keys: list[Tensor]
    values: list[Tensor]
    lengths: Tensor

    @classmethod
    def empty(
        cls, config: DrafterConfig, rows: int, capacity: int, *, dtype: torch.dtype, device: torch.device
    ) -> ContextCache:
        """A cache without context."""
        shape = (rows, config.num_key_value_heads, capacity, config.head_dim)
        # Zeros, not empty memory: a NaN under the mask would still poison the weighted sum.
        keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        return cls(keys, values, torch.zeros(rows, dtype=torch.int64, device=device))

    @property
    def capacity(self) -> int:
        """Context positions a row can hold."""
        return self.keys[0].shape[2]

    def write(self, layers: list[tuple[Tensor, Tensor]], counts: Tensor) -> None:
        """Write Q positions behind each row's context and grow row b by counts[b].

        Positions beyond the capacity are dropped as long as the row does not grow into them.

        Args:
            layers: keys and values of the new positions per layer, [B, kv, Q, hd].
            counts: int64 [B], 0 <= counts <= Q.
        Raises:
            SettingsError: if a count is out of range or a row would outgrow the capacity.
        """
        written = layers[0][0].shape[2]
        counts = counts.to(self.lengths)
        grown = self.lengths + counts
        if bool((counts < 0).any()) or bool((counts > written).any()) or int(grown.max()) > self.capacity:
            raise SettingsError(
                f"cannot keep {counts.tolist()} of {written} new positions behind {self.lengths.tolist()}: "
                f"the context cache holds {self.capacity}",
                "allocate the cache for the longest sequence",
            )
        positions = self.lengths.unsqueeze(1) + torch.arange(written, device=self.lengths.device)  # [B, Q]
        rows, columns = torch.nonzero(positions < self.capacity, as_tuple=True)
        targets = positions[rows, columns]
        for index, (keys, values) in enumerate(layers):
            self.keys[index][rows, :, targets] = keys[rows, :, columns].to(self.keys[index].dtype)
            self.values[index][rows, :, targets] = values[rows, :, columns].to(self.values[index].dtype)
        self.lengths = grown

    def read(self) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Keys and values up to the longest row, [B, kv, S, hd] per layer, and what each row sees, bool [B, 1, S]."""
        used = len(self.lengths)
        longest = int(self.lengths.max()) if self.lengths.numel() else 0
        visible = torch.arange(longest, device=self.lengths.device) < self.lengths[:, None, None]
        pairs = zip(self.keys, self.values, strict=True)
        return [(keys[:used, :, :longest], values[:used, :, :longest]) for keys, values in pairs], visible

    def keep(self, rows: Sequence[int]) -> None:
        """Drop rows in place: row i becomes what row `rows[i]` was; `rows[i] == i` or `rows[i] >= len(rows)`."""
        lengths = self.lengths.tolist()
        for row, source in enumerate(rows):
            if row != source:
                for states in (*self.keys, *self.values):
                    states[row, :, : lengths[source]] = states[source, :, : lengths[source]]
        self.lengths = self.lengths[torch.tensor(rows, dtype=torch.int64, device=self.lengths.device)]

    def spare(self, count: int) -> ContextCache:
        """The next rows that are not in use, empty, on the same memory: what is written into them `take` takes in.

        Raises:
            SettingsError: if there are fewer.
        """
        first, last = len(self.lengths), len(self.lengths) + count
        if last > len(self.keys[0]):
            raise SettingsError(
                f"cannot take {count} more rows in: {first} of {len(self.keys[0])} are in use",
                "allocate the cache for all rows that run together",
            )
        return ContextCache(
            [keys[first:last] for keys in self.keys],
            [values[first:last] for values in self.values],
            self.lengths.new_zeros(count),
        )

    def take(self, joining: ContextCache) -> None:
        """Take the rows in that `spare` gave, with what they hold by now."""
        self.lengths = torch.cat([self.lengths, joining.lengths])
