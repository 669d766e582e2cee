"""Sequential temperature scaling (DSpark, section 3.2.1), kept only where held-out conversations say it helps.

As in the paper, positions are fitted from left to right: with earlier temperatures fixed, T_k comes from a log-spaced
grid and is to minimise the ECE of the cumulative survival a_k against prefix acceptance. Conversations are split into
two halves, one to fit on, one to decide on. Where we depart from the plain grid search, and why:

- The minimum of ECE is a poor estimate: ECE is a sum of absolute values over bins and hardly feels T at later
  positions, where most prefixes are lost already. On 4000 blocks with doubled logits (T = 2 is right) it gives
  anything from 1.3 to 8. So ECE only excludes temperatures that are worse than its minimum beyond noise, the
  log-loss of this position excludes those outside its 95 % likelihood interval, and among the rest the likeliest
  is taken, counting this position fully and each earlier one with half the weight of the next: one linear layer states
  all confidences, so neighbours are likely to be off by a like factor.
- T_k is kept only if held-out conversations give evidence for it: a lower log-loss of c_k (the order of c_k does not
  change with T, so any gain is a gain in calibration; its own, or of the same sign and shared with earlier
  positions) or a lower ECE of a_k, and no evidence of a higher ECE. Otherwise T_k = 1, and the next position is
  fitted upon that.
- From there all temperatures are fitted again at once, to the mean ECE of all positions (`joint`).
- Of the three, the identity stands until held-out conversations give evidence of a lower mean ECE left to right, and
  what then stands until they give evidence of a lower one jointly. Confidences that are noisy rather than overconfident
  gain log-loss by scaling, but hardly ECE.
- What is kept is fitted again, by the same rule, on both halves together; the held-out figures are those of the fit
  half's temperatures. The other half has not seen their values, but what was kept and by which method was decided on
  it, so the figures are a little on the good side. Those of an evaluation (`expectation`) are of other prompts.

Evidence means: outside a 95 % bootstrap interval over conversations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.calibration.assessment import Assessor
from dspark.calibration.half import Half
from dspark.calibration.joint import descend
from dspark.calibration.records import Records
from dspark.calibration.resampling import Estimate
from dspark.calibration.results import Calibration, Choice, Method, PositionFit, STSResult, reliability_rows
from dspark.config.models import CalibrationSettings
from dspark.errors import CalibrationError
from dspark.io.progress import Progress
from dspark.scheduling.survival import prefix_survival

Floats = NDArray[np.float64]

GRID: Floats = 10.0 ** (np.arange(-60, 61) / 60)  # 0.1 .. 10 in steps of 3.9 %, 1.0 in the middle
ECE_NOISE = 2.0  # standard errors of the paired difference within which two ECEs count as equal
LIKELIHOOD_DROP = 1.92  # half the 95 % point of chi-squared with one degree of freedom
NEIGHBOUR_WEIGHT = 0.5
FIT_RESAMPLES = 200
MIN_CONVERSATIONS = 10  # that reach a position, per half; of fewer a bootstrap over conversations means nothing


def fit_temperatures(
    records: Records, settings: CalibrationSettings | None = None, *, progress: Progress | None = None
) -> STSResult:
    """Fit one temperature per draft position and judge them on held-out conversations.

    Args:
        records: of one sampling; at least `min_samples` drafts of `MIN_CONVERSATIONS` conversations must reach a
            position in each half for its fit.
        settings: bins, min_samples and seed are used; None: the defaults.
        progress: advanced by one per position; None: nobody watches.
    Returns:
        temperatures (1 wherever scaling is not shown to help, with the reason), the held-out assessment of those of
        the fit half, and warnings.
    Raises:
        CalibrationError: there are no records.
        Interrupted: at a safe point between positions.
    """
    settings = settings or CalibrationSettings()
    progress = progress or Progress()
    if len(records) == 0:
        raise CalibrationError("there are no confidence records to calibrate on")
    fit_records, held_out_records = records.split(settings.seed)
    fit = Half.to_fit(fit_records, FIT_RESAMPLES, settings.seed)
    held_out = Half.of(held_out_records, 1000, settings.seed)
    positions: list[PositionFit] = []
    warnings: list[str] = []
    pooled: Floats = np.zeros(GRID.size)
    progress.start("fit temperatures", records.gamma, unit="positions")
    for k in range(records.gamma):
        position = PositionFit(
            position=k + 1,
            temperature=1.0,
            reached_fit=int(fit_records.reached[:, k].sum()),
            reached_held_out=int(held_out_records.reached[:, k].sum()),
        )
        problem = _problem(fit_records, held_out_records, k, settings.min_samples)
        candidate = 1.0
        if not problem:
            candidate, pooled = _candidate(fit, k, pooled, settings.bins)
        if problem:
            warnings.append(f"position {k + 1}: {problem}; T stays 1")
            position = position.model_copy(update={"fallback": problem})
        else:
            position = _judge(held_out, k, candidate, position, settings.bins)
            if position.temperature in (GRID[0], GRID[-1]):
                warnings.append(
                    f"position {k + 1}: the fit runs to the edge of the grid, {candidate:g}; it helps on held-out "
                    "conversations and is kept, but the best temperature may lie beyond"
                )
        positions.append(position)
        fit.append(k, position.temperature)
        held_out.append(k, position.temperature)
        progress.advance()
    assessor = Assessor(held_out_records, held_out.resampling, settings.bins)
    method, choices, positions, dropped = _choose(positions, fit_records, assessor)
    assessment = assessor.assess(_temperatures(positions))
    refitted = _refit(records, method, positions, settings)
    calibration = Calibration(
        key=records.key,
        source=records.source,
        method=method,
        positions=refitted,
        temperatures=_temperatures(refitted),
        held_out=assessment,
        choices=choices,
        rows_fit=len(fit_records),
        conversations_fit=fit_records.conversations,
        min_samples=settings.min_samples,
        seed=settings.seed,
        warnings=tuple(warnings + dropped),
    )
    return STSResult(calibration, reliability_rows(held_out_records, assessment.temperatures, bins=settings.bins))


def apply(records: Records | ArrayLike, temperatures: ArrayLike) -> Floats:
    """Calibrated prefix survival of records or raw logits, [n, gamma].

    Raises:
        CalibrationError: as `prefix_survival`.
    """
    return prefix_survival(records.z if isinstance(records, Records) else records, temperatures)


def _problem(fit: Records, held_out: Records, k: int, needed: int) -> str | None:
    """Why position k cannot be fitted, or None."""
    reasons = []
    halves = [half.survived[half.reached[:, k], k] for half in (fit, held_out)]
    reached = [half.size for half in halves]
    together = np.concatenate(halves)
    if together.size == 0:
        reasons.append("no accepted prefix leads to it")
    elif together.all():
        reasons.append(f"all {together.size} drafts that reached it were accepted")
    elif not together.any():
        reasons.append(f"none of the {together.size} drafts that reached it was accepted")
    elif min(reached) >= needed and any(half.all() or not half.any() for half in halves):
        reasons.append("all drafts or none of them were accepted in one half of the conversations")
    if min(reached) < needed:
        reasons.append(
            f"too few samples: {reached[0]} and {reached[1]} drafts reached it in the two halves, "
            f"{needed} are needed in each"
        )
    conversations = [half.conversations_among(half.reached[:, k]) for half in (fit, held_out)]
    if min(conversations) < MIN_CONVERSATIONS:
        reasons.append(
            f"too few conversations: {conversations[0]} and {conversations[1]} reached it in the two halves, "
            f"{MIN_CONVERSATIONS} are needed in each"
        )
    return ", ".join(reasons) or None


def _candidate(half: Half, k: int, pooled: Floats, bins: int) -> tuple[float, Floats]:
    """The temperature that the fit half prefers at position k, and the pooled log-loss per grid temperature."""
    points, sampling = half.points(k), half.resampling
    sizes = np.bincount(points.groups, weights=points.size, minlength=sampling.count)
    gaps = np.stack([points.gaps(value, bins) for value in GRID], axis=1)  # [groups, grid, bins]
    errors = np.abs(gaps.sum(axis=0)).sum(axis=1) / sizes.sum()
    weights = sampling.weights[sampling.weights @ sizes > 0]  # a resample without any of the rows tells nothing
    resampled = (weights @ gaps.reshape(sampling.count, -1)).reshape(-1, GRID.size, bins)
    draws = np.abs(resampled).sum(axis=2) / (weights @ sizes)[:, None]  # [resamples, grid]
    best = int(np.argmin(errors))
    noise = (draws - draws[:, [best]]).std(axis=0)
    as_calibrated = errors - errors[best] <= ECE_NOISE * noise
    losses = half.log_losses_of_grid(k, GRID)
    as_likely = losses - losses.min() <= LIKELIHOOD_DROP
    allowed = as_calibrated & as_likely if (as_calibrated & as_likely).any() else as_calibrated
    pooled = losses + NEIGHBOUR_WEIGHT * pooled
    return float(GRID[np.argmin(np.where(allowed, pooled, np.inf))]), pooled


def _judge(half: Half, k: int, candidate: float, position: PositionFit, bins: int) -> PositionFit:
    """Keep the candidate if the held-out half shows that it helps."""
    if candidate == 1.0:
        return _unscaled(position)
    own = half.log_loss_change([k], candidate)
    ece = half.ece_change(k, candidate, bins)
    likelier = own.interval[1] < 0
    if own.value < 0 and not likelier:
        likelier = half.log_loss_change(range(k + 1), candidate).interval[1] < 0
    judged = _judged(position, candidate, own, ece)
    if ece.interval[0] > 0:
        return judged.model_copy(update={"fallback": f"held-out ECE is higher at {candidate:.3g}"})
    if not likelier and ece.interval[1] >= 0:
        return judged.model_copy(update={"fallback": f"no held-out evidence that {candidate:.3g} is better than 1"})
    return judged.model_copy(update={"temperature": candidate})


def _judged(position: PositionFit, candidate: float, log_loss: Estimate, ece: Estimate) -> PositionFit:
    """A position with its candidate and what it changes."""
    changes = {"log_loss_change": log_loss.measured(low=-np.inf, high=np.inf), "ece_change": ece.measured()}
    return position.model_copy(update={"candidate": candidate, **changes})


def _unscaled(position: PositionFit) -> PositionFit:
    """A position at which no other temperature was found."""
    unscaled = {"temperature": 1.0, "candidate": 1.0, "fallback": "1 is the best temperature"}
    return position.model_copy(update=unscaled)


def _choose(
    positions: list[PositionFit], fit: Records, held_out: Assessor
) -> tuple[Method, tuple[Choice, ...], list[PositionFit], list[str]]:
    """The way of fitting that held-out conversations speak for, all that were weighed, and the positions by it."""
    free = np.array([position.candidate is not None for position in positions])
    if not free.any():
        return "identity", (), positions, []
    found = np.array(_temperatures(positions))
    fitted: dict[Method, Floats] = {
        "identity": np.ones(free.size),
        "sts": found,
        "joint": descend(fit, found, free, GRID, held_out.bins),
    }
    errors = {method: held_out.mean_ece(temperatures) for method, temperatures in fitted.items()}
    chosen: Method = "identity"
    others: tuple[Method, ...] = ("sts", "joint")
    for method in others:
        if (errors[method] - errors[chosen]).interval[1] < 0:
            chosen = method
    choices = tuple(
        Choice(method=method, temperatures=tuple(fitted[method].tolist()), mean_ece=error.measured(low=0))
        for method, error in errors.items()
    )
    dropped: list[str] = []
    if chosen == "identity" and (found != 1).any():
        change = (errors["sts"] - errors["identity"]).measured()
        reason = f"held-out mean ECE does not fall with evidence (change {change})"
        dropped = [f"all temperatures stay 1: {reason}"]
        unscaled = {"temperature": 1.0, "fallback": reason}
        positions = [one.model_copy(update=unscaled) if one.temperature != 1 else one for one in positions]
    elif chosen == "joint":
        positions = _jointly(positions, fitted["joint"], held_out)
    return chosen, choices, positions, dropped


def _jointly(positions: Sequence[PositionFit], temperatures: Floats, held_out: Assessor) -> list[PositionFit]:
    """The positions by a joint fit, each with what held-out conversations say of it upon the ones before it."""
    half = Half(held_out.records, held_out.resampling, np.ones(len(held_out.records)))
    settled = []
    for k, (position, temperature) in enumerate(zip(positions, temperatures.tolist(), strict=True)):
        if position.candidate is None:
            settled.append(position)
        elif temperature == 1:
            nothing = {"log_loss_change": None, "ece_change": None}
            settled.append(_unscaled(position.model_copy(update=nothing)))
        else:
            changes = half.log_loss_change([k], temperature), half.ece_change(k, temperature, held_out.bins)
            judged = _judged(position, temperature, *changes)
            settled.append(judged.model_copy(update={"temperature": temperature, "fallback": None}))
        half.append(k, temperature)
    return settled


def _refit(
    records: Records, method: Method, positions: list[PositionFit], settings: CalibrationSettings
) -> tuple[PositionFit, ...]:
    """Fit the kept positions again on both halves: the same rule with less noise. What fell back to 1 stays there."""
    found = np.array(_temperatures(positions))
    if method == "joint":
        found = descend(records, found, found != 1, GRID, settings.bins)
    elif method == "sts":
        everything, pooled = Half.to_fit(records, FIT_RESAMPLES, settings.seed), np.zeros(GRID.size)
        for k, position in enumerate(positions):
            if position.candidate is not None:
                value, pooled = _candidate(everything, k, pooled, settings.bins)
                found[k] = value if found[k] != 1 else 1.0
            everything.append(k, found[k])
    return tuple(
        position.model_copy(update={"temperature": value})
        for position, value in zip(positions, found.tolist(), strict=True)
    )


def _temperatures(positions: Sequence[PositionFit]) -> tuple[float, ...]:
    return tuple(position.temperature for position in positions)
