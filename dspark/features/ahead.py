"""Features of coming steps, read by a thread in the order in which they will be asked for, within a budget of bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from dspark.errors import SettingsError
from dspark.features.sources import FeatureRow, loaded

READ_BUDGET = 512 << 20


class ReadAhead:
    """Loads the rows of one step after the other.

    What was read and not released yet, the step at hand included, never takes more than the budget, whatever the size
    of the corpus; a step that alone takes more is refused. Rows that cannot be read ahead are loaded when their step is
    taken.

    Args:
        rows_of: the rows of a step; called by the thread too.
        steps: how many there are.
        budget: bytes.
    """

    def __init__(self, rows_of: Callable[[int], Sequence[Any]], steps: int, budget: int = READ_BUDGET) -> None:
        self._rows_of, self._steps, self._budget = rows_of, steps, budget
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._failure: BaseException | None = None
        self._fetched: dict[tuple[int, int], Any] = {}
        self._held = self._at_hand = self.most_held = 0
        self._next = 0

    def take(self, step: int) -> list[Any]:
        """The rows of a step with their features; those of the step before are released.

        Raises:
            SettingsError: they take more than the budget.
            IntegrityError, DataError: as reading and computing them.
        """
        rows = self._rows_of(step)
        readable = [position for position, row in enumerate(rows) if _readable(row)]
        needed = sum(_bytes(rows[position]) for position in readable)
        if needed > self._budget:
            raise SettingsError(
                f"params.yaml: store.read_budget_mib: the features of step {step + 1} take {needed / 2**20:.0f} MiB, "
                f"{self._budget / 2**20:.0f} MiB are allowed for reading ahead",
                "raise store.read_budget_mib, or lower training.sequences_per_step or training.max_length",
            )
        if not readable or step >= self._steps:
            return loaded(rows)
        if self._thread is None or step != self._next:
            self._start(step)
        with self._changed:
            self._held -= self._at_hand
            self._at_hand = needed
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failure is not None or self._complete(step, readable))
            if self._failure is not None and not self._complete(step, readable):
                raise self._failure
            fetched = {position: self._fetched.pop((step, position)) for position in readable}
        self._next = step + 1
        return loaded(rows, fetched)

    def close(self) -> None:
        """Stop reading and release everything."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._thread, self._failure = None, None
        self._fetched.clear()
        self._held = self._at_hand = 0

    def _complete(self, step: int, positions: Sequence[int]) -> bool:
        return all((step, position) in self._fetched for position in positions)

    def _start(self, step: int) -> None:
        self.close()
        self._stopped = False
        self._thread = threading.Thread(target=self._read, args=(step,), daemon=True, name="read-ahead")
        self._thread.start()

    def _read(self, first: int) -> None:
        try:
            for step in range(first, self._steps):
                for position, row in enumerate(self._rows_of(step)):
                    if _readable(row) and not self._fetch(step, position, row):
                        return
        except BaseException as reason:  # whoever waits for the features is told
            with self._changed:
                self._failure = reason
                self._changed.notify_all()

    def _fetch(self, step: int, position: int, row: FeatureRow) -> bool:
        """Read one row when there is room for it; False if reading was stopped."""
        size = _bytes(row)
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._held + size <= self._budget)
            if self._stopped:
                return False
            self._held += size
            self.most_held = max(self.most_held, self._held)
        fetched = row.source.fetch(row.index)
        with self._changed:
            self._fetched[step, position] = fetched
            self._changed.notify_all()
        return True


def _readable(row: Any) -> bool:
    return isinstance(row, FeatureRow) and row.source.ahead


def _bytes(row: FeatureRow) -> int:
    return row.source.feature_bytes(row.index)
