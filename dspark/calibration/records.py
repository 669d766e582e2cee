"""Confidence records: what the confidence head said and what verification decided, draft by draft."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.errors import CalibrationError
from dspark.scheduling.config import CalibrationKey, Label
from dspark.scheduling.survival import check_temperatures, confidences

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Integers = NDArray[np.intp]

DECODING = "the decoding loop of dspark"


@dataclass(frozen=True)
class Records:
    """Drafted blocks of draft-verify decoding with the whole block verified, n blocks of gamma tokens.

    Replayed text will not do: behind the first deviation the target's view is unknown (package.md).

    Attributes:
        logits: raw confidence logits z, [n, gamma].
        accepted: true where the draft was accepted up to and including this position: a prefix, [n, gamma].
        valid: false where the outcome is unknown: a prefix as well, [n, gamma]; None: all are known. Such positions
            are left out; they are not rejections. What hides a position must not depend on its outcome: a length limit
            does not, and behind a drafted end of sequence positions are left out whether or not it was accepted.
        conversation: which conversation a block comes from, numbers or strings, [n]; None: each its own. Blocks of
            one conversation resemble each other, so conversations are what is split and resampled.
        temperature, top_k, top_p, rule, label: the sampling under which they were recorded (`CalibrationKey`).
        source: who recorded them.
    Raises:
        CalibrationError: shapes that do not fit, masks that are not prefixes, logits that are not finite, a key that
            does not validate; names row and position, rows counted from 0 and positions from 1.
    """

    logits: ArrayLike
    accepted: ArrayLike
    valid: ArrayLike | None = None
    conversation: ArrayLike | Sequence[str] | None = None
    temperature: float = 1.0
    label: Label = "sampled"
    top_k: int = 0
    top_p: float = 1.0
    rule: Literal["standard", "block"] = "standard"
    source: str = DECODING
    z: Floats = field(init=False, repr=False)  # the logits, 0 where they are not valid, [n, gamma]
    survived: Flags = field(init=False, repr=False)  # accepted and valid, [n, gamma]
    known: Flags = field(init=False, repr=False)  # valid, [n, gamma]
    key: CalibrationKey = field(init=False, repr=False)

    def __post_init__(self) -> None:
        z = np.asarray(self.logits, dtype=np.float64)
        if z.ndim != 2 or z.shape[1] == 0:
            raise CalibrationError(f"confidence logits must be [n, gamma] with gamma > 0, got shape {z.shape}")
        known = np.ones(z.shape, dtype=bool) if self.valid is None else _flags(self.valid, "valid", z.shape)
        accepted = _flags(self.accepted, "accepted", z.shape)
        _check_prefix(known, "valid")
        _check_prefix(accepted & known, "accepted")
        wrong = np.argwhere(known & ~np.isfinite(z))
        if wrong.size:
            row, position = wrong[0]
            raise CalibrationError(f"confidence logit of row {row} at position {position + 1} is {z[row, position]}")
        if self.conversation is not None and np.shape(self.conversation) != (len(z),):
            raise CalibrationError(
                f"conversation ids have shape {np.shape(self.conversation)}, {len(z)} rows need [{len(z)}]"
            )
        try:
            key = CalibrationKey(
                temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, rule=self.rule, label=self.label
            )
        except ValueError as reason:
            raise CalibrationError(f"records were made under a sampling that cannot be: {reason}") from None
        # Position by position in memory, which is how they are read.
        object.__setattr__(self, "z", np.asfortranarray(np.where(known, z, 0.0)))
        object.__setattr__(self, "survived", np.asfortranarray(accepted & known))
        object.__setattr__(self, "known", np.asfortranarray(known))
        object.__setattr__(self, "key", key)

    def __len__(self) -> int:
        return len(self.z)

    @property
    def gamma(self) -> int:
        """Draft positions of a block."""
        return int(self.z.shape[1])

    @cached_property
    def reached(self) -> Flags:
        """Where verification got to: valid, and everything before was accepted, [n, gamma]."""
        before = np.ones_like(self.survived)
        before[:, 1:] = self.survived[:, :-1]
        return before & self.known

    def survival(self, temperatures: ArrayLike) -> Floats:
        """Calibrated prefix survival, [n, gamma]; kept, since fits and reports ask for the same ones again.

        Raises:
            CalibrationError: temperatures that are not one positive number per position.
        """
        scales = check_temperatures(temperatures, self.gamma)
        key = scales.tobytes()
        if key not in self._survival:
            survival = np.empty_like(self.z)
            before: Floats = np.ones(len(self))
            for k, scale in enumerate(scales):
                before = np.multiply(before, confidences(self.z[:, k], scale), out=survival[:, k])
            self._survival[key] = survival
        return self._survival[key]

    @cached_property
    def _survival(self) -> dict[bytes, Floats]:
        return {}

    @cached_property
    def _conversations(self) -> tuple[NDArray[np.str_], Integers]:
        ids = np.arange(len(self)) if self.conversation is None else np.asarray(self.conversation)
        names, rows = np.unique(ids, return_inverse=True)
        return names.astype(str), rows.reshape(-1)

    @property
    def conversations(self) -> int:
        """How many different conversations there are."""
        return len(self._conversations[0])

    @property
    def conversation_of(self) -> Integers:
        """A number for the conversation of each row, 0 and up, [n]."""
        return self._conversations[1]

    def conversations_among(self, rows: Flags) -> int:
        """How many different conversations the rows of a mask [n] come from."""
        return different(self.conversation_of[rows])

    def split(self, seed: int = 0) -> tuple[Records, Records]:
        """Two halves, each conversation whole in one of them: one to fit on, one to decide on.

        Conversations are ordered by a hash of (seed, id): the halves do not depend on the order of the rows, and
        every domain falls into both.
        """
        names, rows = self._conversations
        order = sorted(range(len(names)), key=lambda index: _hash(seed, str(names[index])))
        first = np.zeros(len(names), dtype=bool)
        first[order[: (len(names) + 1) // 2]] = True
        return self.take(first[rows]), self.take(~first[rows])

    def take(self, rows: Flags) -> Records:
        """The rows of a mask [n]."""
        names, index = self._conversations
        chosen = index[rows]
        part = Records(
            logits=self.z.T[:, rows].T,  # column by column, as they lie in memory
            accepted=self.survived.T[:, rows].T,
            valid=self.known.T[:, rows].T,
            conversation=names[chosen],
            temperature=self.temperature,
            label=self.label,
            top_k=self.top_k,
            top_p=self.top_p,
            rule=self.rule,
            source=self.source,
        )
        # Worked out from the few names; asked for, it would sort those of all rows.
        present = np.flatnonzero(np.bincount(chosen, minlength=len(names)))
        order = np.argsort(names[present])
        places = np.zeros(len(names), np.intp)
        places[present[order]] = np.arange(len(present))
        part.__dict__["_conversations"] = names[present[order]], places[chosen]
        return part

    def groups(self, most: int) -> tuple[Integers, int]:
        """Whole conversations gathered into at most `most` groups: the units of resampling.

        Returns:
            the group of each row [n], and how many groups there are.
        """
        rows = self._conversations[1]
        count = min(self.conversations, most)
        return (rows % count if count else rows), count


def different(numbers: Integers) -> int:
    """How many different ones there are, 0 and up each."""
    return int(np.count_nonzero(np.bincount(numbers)))


def _flags(value: ArrayLike, name: str, shape: tuple[int, ...]) -> Flags:
    flags = np.asarray(value)
    if flags.shape != shape:
        raise CalibrationError(f"{name} has shape {flags.shape}, the logits have {shape}")
    if flags.dtype != bool and not np.isin(flags, (0, 1)).all():
        raise CalibrationError(f"{name} must hold only true and false (or 1 and 0)")
    return flags.astype(bool)


def _check_prefix(mask: Flags, name: str) -> None:
    broken = np.argwhere(mask[:, 1:] & ~mask[:, :-1])
    if broken.size:
        row, position = broken[0]
        raise CalibrationError(
            f"{name} of row {row} is not a prefix: position {position + 2} is set and position {position + 1} is not"
        )


def _hash(seed: int, name: str) -> str:
    return hashlib.sha256(f"{seed}:{name}".encode()).hexdigest()
