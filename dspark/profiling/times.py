"""What a cycle takes between the shapes that a profile measured: what predictions of throughput go by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark.decoding.prefixes import Counts, is_worth_packing
from dspark.errors import DataError
from dspark.profiling.cost import CostReport, CostRow

Floats = NDArray[np.float64]


class _Line(NamedTuple):
    """Steps of one number of requests at one context."""

    per_request: Floats  # tokens of a step over its requests, rising
    seconds: Floats


class MeasuredSteps:
    """Step times of a cost report, linear in tokens, requests and context between those that were measured.

    Beyond the contexts and the tokens that were measured the nearest ones stand for them. More requests than were
    measured are refused: nothing tells what they would cost. Fewer cost as much as the fewest that were, which is what
    the tail of a round is taken for, as its requests end one by one: where it matters, measure from one request on.

    Args:
        report: of an engine.
        packs: whether the engine lays rows of different lengths one behind the other where that saves enough; False: a
            step is as wide as its longest row.
    Raises:
        DataError: no step that drafts was measured.
    """

    def __init__(self, report: CostReport, *, packs: bool = True) -> None:
        self._profile, self._packs = report.profile, packs
        self._drafting = _Table(report.rows)
        self._plain = _Table(report.plain)
        self._why_not_plain = report.absent.get("plain", "the profile has no such steps")
        if not self._drafting.requests.size:
            raise DataError(f"no step of profile {report.profile} was measured", "profile it: dspark run --build NAME")

    @property
    def most_requests(self) -> int:
        """Requests of the largest step that was measured, plainly too if any was."""
        return int(min(table.requests[-1] for table in (self._drafting, self._plain) if table.requests.size))

    @property
    def least_requests(self) -> int:
        """Requests of the smallest step that was measured, plainly too if any was."""
        return int(max(table.requests[0] for table in (self._drafting, self._plain) if table.requests.size))

    def drafting(self, lengths: Counts, contexts: Counts) -> float:
        """Seconds of a cycle that drafts and verifies; see `evaluation.prediction.StepTimes`."""
        self._check(len(lengths))
        widths = lengths + 1
        packed = self._packs and is_worth_packing(widths)
        return self._drafting.at(len(lengths), float(widths.mean() if packed else widths.max()), _reach(contexts))

    def plain(self, contexts: Counts) -> float:
        """Seconds of a cycle of plain decoding.

        Raises:
            DataError: none was measured, as on a server that runs with its drafter.
        """
        if not self._plain.requests.size:
            raise DataError(
                f"no step of plain decoding was measured on profile {self._profile}: {self._why_not_plain}",
                "predict policies that draft",
            )
        self._check(len(contexts))
        return self._plain.at(len(contexts), 1.0, _reach(contexts))

    def _check(self, requests: int) -> None:
        if requests > self.most_requests:
            raise DataError(
                f"profile {self._profile} measured steps of {self.most_requests} requests at most, not of {requests}",
                f"add {requests} to `requests` in serving_profiles/{self._profile}.yaml and profile again",
            )


class _Table:
    """Rows by context and requests."""

    def __init__(self, rows: Iterable[CostRow]) -> None:
        found: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for row in rows:
            point = (row.verify_tokens / row.requests, row.step_seconds)
            found.setdefault((row.context, row.requests), []).append(point)
        self.contexts = np.array(sorted({context for context, _ in found}), np.float64)
        self.requests = np.array(sorted({requests for _, requests in found}), np.float64)
        self._lines = {key: _Line(*np.array(sorted(points), np.float64).T) for key, points in found.items()}

    def at(self, requests: int, per_request: float, context: float) -> float:
        """Seconds of a step."""
        by_context = []
        for there in self.contexts:
            at = [one for one in self.requests if (int(there), int(one)) in self._lines]
            lines = [self._lines[int(there), int(one)] for one in at]
            by_context.append(np.interp(requests, at, [np.interp(per_request, *line) for line in lines]))
        return float(np.interp(context, self.contexts, by_context))


def _reach(contexts: Counts) -> float:
    """A pass reads as far as the longest context reaches."""
    return float(contexts.max())
