"""How far drafts get: tau and acceptance per position, from records of the sequential decoding loop.

tau never comes from a mean over spaced anchors, which lands less often on hard positions than the loop does
(package.md). numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from dspark.calibration import Records, assess
from dspark.config.models import DType
from dspark.decoding.prefixes import below_threshold
from dspark.decoding.records import Decoded, RecordSet, calibration_records
from dspark.errors import DataError
from dspark.evaluation.expectation import expectation
from dspark.evaluation.results import Acceptance, DomainMetrics, MeanOfDomains, TemperatureMetrics
from dspark.io.csvfile import read_csv, write_csv
from dspark.measured import Measured, bootstrap, ratio_of_sums

Floats = NDArray[np.float64]

THRESHOLDS = tuple(round(0.1 * step, 1) for step in range(9))  # 0.0 .. 0.8 (DSpark, section 4.1)
NO_CONFIDENCE = "the drafter has no confidence head"


@dataclass(frozen=True)
class _Counts:
    """Sums per prompt."""

    committed: Floats  # tokens of all cycles, [prompts]
    cycles: Floats  # [prompts]
    reached: Floats  # blocks whose positions before k were accepted and whose outcome at k is known, [prompts, gamma]
    accepted: Floats  # of these, accepted at k, [prompts, gamma]

    @classmethod
    def of(cls, decoded: Sequence[Decoded]) -> _Counts:
        reached, accepted = [], []
        for one in decoded:
            cycles = one.cycles
            slots = np.arange(cycles.gamma)
            arrived = cycles.valid & (slots <= cycles.accepted[:, None])
            reached.append(arrived.sum(axis=0))
            accepted.append((arrived & cycles.survived).sum(axis=0))
        return cls(
            np.array([one.cycles.committed.sum() for one in decoded], np.float64),
            np.array([len(one.cycles) for one in decoded], np.float64),
            np.array(reached, np.float64),
            np.array(accepted, np.float64),
        )


def measure_temperature(
    records: RecordSet,
    training_domains: Sequence[str],
    dtype: DType,
    *,
    temperatures: Sequence[float] | None = None,
    seed: int = 0,
) -> TemperatureMetrics:
    """All acceptance figures of one temperature.

    Args:
        records: whole blocks verified (policy `fixed`).
        training_domains: the domains whose mean is taken; others are reported beside.
        dtype: in which was decoded.
        temperatures: of the confidence head at this temperature of the target, [gamma]; None: not calibrated.
        seed: of the bootstrap.
    Raises:
        DataError: records of another policy.
    """
    if any(one.policy != "fixed" for one in records.decoded):
        raise DataError("acceptance per position needs records of whole verified blocks (policy fixed)")
    domains: dict[str, DomainMetrics] = {}
    absent: dict[str, str] = {}
    for domain in sorted(set(records.domains)):
        chosen = records.of_domain(domain).decoded
        if sum(len(one.cycles) for one in chosen) == 0:
            absent[domain] = "every text ended with its first token: there was no cycle"
            continue
        domains[domain] = _domain(chosen, temperatures, trained=domain in training_domains, seed=seed)
    mean = mean_of_domains(records, [domain for domain in training_domains if domain in domains], seed=seed)
    missing = [domain for domain in training_domains if domain not in domains]
    if missing:
        mean = None
        absent["mean_of_domains"] = f"no figures for {', '.join(missing)}"
    trained = records.only([i for i, domain in enumerate(records.domains) if domain in training_domains])
    confidence = None
    if not all(one.cycles.confident for one in records.decoded):
        absent["confidence"] = NO_CONFIDENCE
    elif temperatures is None:
        absent["confidence"] = "no calibration for this temperature"
    elif sum(len(one.cycles) for one in trained.decoded) == 0:
        absent["confidence"] = "no block was drafted on the domains trained on"
    else:
        arrays = calibration_records(trained.decoded)
        confidence = assess(Records(**vars(arrays)), temperatures, seed=seed)
    return TemperatureMetrics(
        label=records.label, dtype=dtype, domains=domains, mean_of_domains=mean, confidence=confidence, absent=absent
    )


def measure_acceptance(decoded: Sequence[Decoded], *, seed: int = 0) -> Acceptance:
    """tau, conditional and marginal acceptance of some prompts; at least one cycle.

    Marginal acceptance is the product of the conditional ones (Kaplan-Meier): a draft whose block was cut by an end
    of sequence tells that it got so far, and nothing beyond, and is not mistaken for a rejection.
    """
    counts = _Counts.of(decoded)
    reached = counts.reached.sum(axis=0)
    gamma = len(reached)
    seen = int(np.argmin(reached > 0)) if (reached == 0).any() else gamma
    conditional, marginal = [], []
    for k in range(seen):
        conditional.append(_known(ratio_of_sums(counts.accepted[:, k], counts.reached[:, k], seed=seed)))

        def survival(chosen: NDArray[np.intp], k: int = k) -> float:
            hits, tries = counts.accepted[chosen, : k + 1].sum(axis=0), counts.reached[chosen, : k + 1].sum(axis=0)
            alive = np.concatenate(([True], hits[:-1] > 0))  # nothing survives what nothing has passed
            if not alive.all():
                return 0.0
            return float(np.prod(hits / tries)) if (tries > 0).all() else float("nan")

        marginal.append(_known(bootstrap(len(decoded), survival, seed=seed)))
    absent = {}
    if seen < gamma:
        positions = f"position {gamma}" if seen + 1 == gamma else f"positions {seen + 1} to {gamma}"
        absent["conditional"] = absent["marginal"] = f"no block reached {positions}"
    return Acceptance(
        tau=_known(ratio_of_sums(counts.committed, counts.cycles, seed=seed)),
        conditional=tuple(conditional),
        marginal=tuple(marginal),
        absent=absent,
    )


def mean_of_domains(records: RecordSet, domains: Sequence[str], *, seed: int = 0) -> MeanOfDomains | None:
    """The mean of the domains' tau, with an interval over prompts; None without domains."""
    if not domains:
        return None
    chosen = records.only([index for index, domain in enumerate(records.domains) if domain in domains])
    counts = _Counts.of(chosen.decoded)
    where = np.array([domains.index(domain) for domain in chosen.domains])

    def statistic(sample: NDArray[np.intp]) -> float:
        tokens = np.bincount(where[sample], weights=counts.committed[sample], minlength=len(domains))
        cycles = np.bincount(where[sample], weights=counts.cycles[sample], minlength=len(domains))
        return float(np.mean(tokens / cycles)) if (cycles > 0).all() else float("nan")

    tau = bootstrap(len(where), statistic, seed=seed)
    return None if tau is None else MeanOfDomains(domains=tuple(domains), tau=tau)


@dataclass(frozen=True)
class SweepRow:
    """One threshold on one domain: what policy `threshold` would have verified of the recorded blocks.

    Worked out from cycles that verified whole blocks. Under the policy itself the loop would stop at other positions;
    acceptance given a position is the same. Drafts behind a drafted end of sequence or the limit are not counted.
    """

    temperature: float
    domain: str
    confidence: str  # raw or calibrated
    threshold: float
    cycles: int
    verified_per_cycle: float
    accepted_per_cycle: float
    rejected_per_cycle: float
    acceptance_rate: float | None  # accepted / verified; None if nothing was verified
    tau: float


def threshold_sweep(
    records: RecordSet, temperatures: Sequence[float] | None = None, thresholds: Sequence[float] = THRESHOLDS
) -> list[SweepRow]:
    """The sweep of every domain, on raw confidences and, with `temperatures` [gamma], on calibrated ones.

    Without a confidence head there is nothing to sweep.
    """
    if not all(one.cycles.confident for one in records.decoded):
        return []
    kinds: dict[str, Floats | None] = {"raw": None}
    if temperatures is not None:
        kinds["calibrated"] = np.asarray(temperatures, np.float64)
    rows = []
    for domain in sorted(set(records.domains)):
        decoded = [one for one in records.of_domain(domain).decoded if len(one.cycles)]
        for kind, scales in kinds.items():
            rows += [_sweep(decoded, domain, kind, value, scales) for value in thresholds if decoded]
    return rows


def write_position_csv(path: Path, temperatures: Mapping[str, TemperatureMetrics]) -> None:
    """Write `per_position.csv`: one row per temperature, domain and position."""
    columns = ["temperature", "domain", "role", "position"]
    for name in ("conditional", "marginal"):
        columns += [name, f"{name}_low", f"{name}_high", f"{name}_n"]
    rows = [
        [temperature, domain, figures.role, position, *_cells(conditional), *_cells(marginal)]
        for temperature, metrics in temperatures.items()
        for domain, figures in metrics.domains.items()
        for position, (conditional, marginal) in enumerate(
            zip(figures.conditional, figures.marginal, strict=True), start=1
        )
    ]
    write_csv(path, columns, rows)


def write_sweep_csv(path: Path, rows: Sequence[SweepRow]) -> None:
    """Write `threshold_sweep.csv`; a rate of nothing is an empty cell."""
    columns = list(SweepRow.__dataclass_fields__)
    write_csv(path, columns, [list(vars(row).values()) for row in rows])


def read_sweep_csv(path: Path) -> list[SweepRow]:
    """Read `threshold_sweep.csv`.

    Raises:
        DataError: missing, other columns, or a value that does not parse; names file and line.
    """
    rows = TypeAdapter(SweepRow)
    return read_csv(
        path,
        list(SweepRow.__dataclass_fields__),
        lambda cells: rows.validate_python({name: cell or None for name, cell in cells.items()}),
        DataError,
    )


def _domain(
    decoded: Sequence[Decoded], temperatures: Sequence[float] | None, *, trained: bool, seed: int
) -> DomainMetrics:
    confident = all(one.cycles.confident for one in decoded)
    verified = np.array([one.cycles.known.sum() for one in decoded], np.float64)
    accepted = np.array([np.minimum(one.cycles.accepted, one.cycles.known).sum() for one in decoded], np.float64)
    tokens = np.array([one.emitted.sum() for one in decoded], np.float64)
    seconds = np.array([(one.cycle_seconds / one.cycles.rows).sum() for one in decoded], np.float64)
    return DomainMetrics(
        **vars(measure_acceptance(decoded, seed=seed)),
        role="training" if trained else "evaluation_only",
        prompts=len(decoded),
        stopped=sum(one.finish_reason == "stop" for one in decoded),
        cycles=sum(len(one.cycles) for one in decoded),
        tokens=sum(len(one.token_ids) for one in decoded),
        acceptance_rate=ratio_of_sums(accepted, verified, seed=seed),
        tokens_per_second=ratio_of_sums(tokens, seconds, seed=seed),
        expectation=expectation(decoded, temperatures, seed=seed) if confident else None,
    )


def _sweep(decoded: Sequence[Decoded], domain: str, kind: str, threshold: float, scales: Floats | None) -> SweepRow:
    cycles = [one.cycles for one in decoded]
    logits = np.concatenate([one.confidence_logits for one in cycles])
    accepted = np.concatenate([one.accepted for one in cycles])
    committed = np.concatenate([one.committed for one in cycles])
    known = np.concatenate([one.known for one in cycles])
    cut = below_threshold(logits, threshold, scales)
    verified = np.minimum(cut, known)
    passed = np.minimum(accepted, verified)
    return SweepRow(
        temperature=decoded[0].temperature,
        domain=domain,
        confidence=kind,
        threshold=threshold,
        cycles=len(cut),
        verified_per_cycle=float(verified.mean()),
        accepted_per_cycle=float(passed.mean()),
        rejected_per_cycle=float((passed < verified).mean()),
        acceptance_rate=float(passed.sum() / verified.sum()) if verified.any() else None,
        tau=float(np.where(cut >= accepted, committed, cut + 1).mean()),
    )


def _known(measured: Measured | None) -> Measured:
    if measured is None:
        raise DataError("no cycle was recorded, so there is no acceptance to measure")
    return measured


def _cells(measured: Measured) -> list[float]:
    return [measured.value, *measured.ci95, measured.n]
