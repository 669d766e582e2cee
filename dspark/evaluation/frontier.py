"""Ways of decoding as curves: throughput against the speed that a user sees, and the paper's two ways to compare them.

DSpark states gains as throughput at a promised speed and as speed at the throughput that a baseline has (section 5).
Neither is a ratio at one number of requests: a faster policy reaches the same speed with more of them. Between two
neighbouring loads of a curve both are interpolated; beyond the loads that were measured nothing is. numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dspark.evaluation.results import Model
from dspark.evaluation.rounds import Comparison
from dspark.measured import Measured, bootstrap_sums

Floats = NDArray[np.float64]
Form = Literal["throughput_at_sla", "speed_at_matched_throughput"]
FORMS: tuple[Form, ...] = get_args(Form)


def throughput_at_sla(speeds: Floats, throughputs: Floats, sla: Floats) -> Floats:
    """The most tokens per second of all users while each of them still gets `sla`.

    Args:
        speeds: tokens per second of one user at each load, by ascending load, [..., loads].
        throughputs: tokens per second of all users there, [..., loads].
        sla: tokens per second of one user, [...].
    Returns:
        [...]; NaN where no load is that fast.
    """
    return _most(throughputs, speeds, sla)


def speed_at_matched_throughput(speeds: Floats, throughputs: Floats, throughput: Floats) -> Floats:
    """The most tokens per second of one user while all together get `throughput`.

    Args:
        speeds, throughputs: as above.
        throughput: tokens per second of all users, [...].
    Returns:
        [...]; NaN where no load has so much.
    """
    return _most(speeds, throughputs, throughput)


def _most(wanted: Floats, bound: Floats, least: Floats) -> Floats:
    """The largest value of one side of a curve where the other one is at least `least`."""
    least = np.asarray(least, np.float64)[..., None]
    holds = bound >= least
    at_loads = np.where(holds, wanted, -np.inf)
    crosses = holds[..., 1:] != holds[..., :-1]
    rise = bound[..., 1:] - bound[..., :-1]
    share = np.divide(least - bound[..., :-1], rise, out=np.zeros_like(rise), where=crosses)
    between = np.where(crosses, wanted[..., :-1] + share * (wanted[..., 1:] - wanted[..., :-1]), -np.inf)
    best: Floats = np.concatenate([at_loads, between], axis=-1).max(axis=-1)
    return np.where(np.isfinite(best), best, np.nan)


class Gain(Model):
    """One arm against another one, in one of the two forms."""

    form: Form
    arm: str
    against: str
    concurrency: int | None = None  # the load of `against` that is matched; None: a level that somebody named
    # What both have to reach: tokens per second of one user, or of all.
    level: float
    value: float | None = None  # of the arm: what is compared
    # Of it to the other arm's; above 1 is a gain. Intervals over rounds; a draw in which the arm misses the level is 0.
    ratio: Measured | None = None
    at_least: bool = False  # the arm is above the level at the largest load that was measured: it would get further
    reason: str | None = None  # why there is no value, or nothing to take a ratio to


class Curves:
    """Arms at several loads, with all rounds apart, so that they can be resampled together.

    Args:
        comparisons: of the same arms with equally many rounds, by ascending concurrency.
    """

    def __init__(self, comparisons: Sequence[Comparison]) -> None:
        self.loads = tuple(one.concurrency for one in comparisons)
        self._seed = comparisons[0].seed
        self._sums = {
            arm.name: np.stack([_sums(comparison, arm.name) for comparison in comparisons], axis=1)
            for arm in comparisons[0].arms
        }  # [rounds, loads, 4]

    def gains(self, arm: str, against: str, slas: Sequence[float] = ()) -> list[Gain]:
        """An arm against another one: at each load of the other, and at levels of speed that somebody promised.

        Args:
            slas: tokens per second of one user.
        """
        found = []
        for form in FORMS:
            places: list[tuple[int | None, float | None]] = [(place, None) for place in range(len(self.loads))]
            places += [(None, sla) for sla in slas if form == "throughput_at_sla"]
            found += [self._gain(form, arm, against, place, level) for place, level in places]
        return found

    def _gain(self, form: Form, arm: str, against: str, place: int | None, level: float | None) -> Gain:
        most = throughput_at_sla if form == "throughput_at_sla" else speed_at_matched_throughput
        columns = np.stack([self._sums[arm], self._sums[against]], axis=1)  # [rounds, 2, loads, 4]
        shape = columns.shape[1:]

        def needed(baseline: tuple[Floats, Floats]) -> Floats:
            """The level: of the baseline's own load, drawn with it, or the one that was named."""
            speeds, throughputs = baseline
            if place is None:
                return np.full(speeds.shape[:-1], level, np.float64)
            return (speeds if form == "throughput_at_sla" else throughputs)[..., place]

        def ratio(sums: Floats) -> Floats:
            both = sums.reshape(*sums.shape[:-1], *shape)
            mine, theirs = _curve(both[..., 0, :, :]), _curve(both[..., 1, :, :])
            least = needed(theirs)
            # Where the arm misses the level it serves nobody: left out, such draws would make it look sure.
            return np.nan_to_num(most(*mine, least)) / most(*theirs, least)

        whole = columns.sum(axis=0)
        mine, theirs = _curve(whole[0]), _curve(whole[1])
        least = float(needed(theirs))
        value = float(most(*mine, needed(theirs)))
        known = np.isfinite(value)
        # A baseline that is above the level at the largest load would get further, too: nothing to take a ratio to.
        cut_off = known and place is None and bool(theirs[0][-1] > least)
        measured = reason = None
        if cut_off:
            reason = f"{against} is still faster than that at the largest load"
        elif known:
            measured = bootstrap_sums(columns.reshape(len(columns), -1), ratio, seed=self._seed)
        if measured is None and reason is None:
            slower = arm if not known else against
            what = "one user" if form == "throughput_at_sla" else "all users"
            reason = f"{slower} reaches {least:.3g} tokens/s of {what} at no load"
        return Gain(
            form=form,
            arm=arm,
            against=against,
            concurrency=None if place is None else self.loads[place],
            level=least,
            value=value if known else None,
            ratio=measured,
            at_least=bool(measured is not None and form == "throughput_at_sla" and mine[0][-1] >= least),
            reason=reason,
        )


def _sums(comparison: Comparison, arm: str) -> Floats:
    """Of each round tokens, seconds, tokens after the first ones, seconds that requests took for these, [rounds, 4]."""
    return np.array(
        [
            [
                each.tokens,
                each.seconds,
                each.tokens - len(each.requests),
                sum(float(one.cycle_seconds.sum()) for one in each.requests),
            ]
            for each in comparison.rounds[arm]
        ],
        np.float64,
    )


def _curve(sums: Floats) -> tuple[Floats, Floats]:
    """Speed of a user and throughput at each load; sums: [..., loads, 4]."""
    tokens, seconds, later, of_requests = np.moveaxis(sums, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return later / of_requests, tokens / seconds
