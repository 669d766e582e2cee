"""Two builds or packages on the same prompts: how far apart they are, prompt by prompt, as far as records allow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.decoding.records import RecordSet, read_records
from dspark.errors import DataError
from dspark.evaluation.paired import PairedPrompts, relative_difference
from dspark.measured import Measured
from dspark.report.page.evidence import Evidence

SAME_RUN = "decoded in the same run"


@dataclass(frozen=True)
class Difference:
    """Two taus of one domain at one temperature.

    Attributes:
        first, second: tau as each side's evaluation has it; None: it was not measured.
        relative: first / second - 1 on the prompts that both decoded, paired; n counts them. None: see `basis`.
        basis: what the pairs are, or why there are none.
    """

    temperature: str
    domain: str
    first: Measured | None
    second: Measured | None
    relative: Measured | None
    basis: str


def differences(first: Evidence, second: Evidence) -> list[Difference]:
    """Every domain that either side has measured, at every temperature."""
    found = []
    for temperature in _temperatures(first, second):
        pairs: PairedPrompts | None = None
        try:
            pairs, basis = paired_prompts(first, second, temperature)
        except DataError as reason:
            basis = f"not paired: {reason.message}"
        for domain in _domains(first, second, temperature):
            relative = relative_difference(*pairs.of_domain(domain)) if pairs is not None else None
            why = basis if relative is not None or pairs is None else "not paired: no prompt of it in common"
            mine, theirs = (_tau(side, temperature, domain) for side in (first, second))
            found.append(Difference(temperature, domain, mine, theirs, relative, why))
    return found


def paired_prompts(first: Evidence, second: Evidence, temperature: str) -> tuple[PairedPrompts, str]:
    """What both sides did on the prompts that both decoded, and where that is from.

    A comparison that one run made is taken before records of two.

    Raises:
        DataError: another target, no records, or no prompt in common.
    """
    rival = first.paired.rival(second.digest) if first.paired is not None and second.digest is not None else None
    if rival is not None and temperature in rival.temperatures:
        return rival.temperatures[temperature], SAME_RUN
    _require_same_target(first, second)
    mine, theirs = (_records(side, temperature) for side in (first, second))
    places = {name: place for place, name in enumerate(theirs.ids)}
    shared = [place for place, name in enumerate(mine.ids) if name in places]
    if not shared:
        raise DataError("no prompt in common")
    return (
        PairedPrompts.of(mine.only(shared), theirs.only([places[mine.ids[place]] for place in shared])),
        f"{len(shared)} prompts of the same name, from the records of two runs",
    )


def _require_same_target(first: Evidence, second: Evidence) -> None:
    targets = (first.files.target, second.files.target)
    if None in targets:
        raise DataError("it is not known whether both draft for the same target")
    if targets[0] != targets[1]:
        raise DataError("they draft for different targets")


def _records(side: Evidence, temperature: str) -> RecordSet:
    path = side.files.plots.evaluate / "records" / f"temperature-{temperature}.safetensors"
    if not path.is_file():
        raise DataError(f"{side.files.name} has no records of single prompts at temperature {temperature}")
    try:
        return read_records(path)
    except DataError:
        raise DataError(f"the records of {side.files.name} are of another version of dspark, or damaged") from None


def _temperatures(*sides: Evidence) -> Sequence[str]:
    return list(dict.fromkeys(key for side in sides if side.metrics is not None for key in side.metrics.temperatures))


def _domains(first: Evidence, second: Evidence, temperature: str) -> Sequence[str]:
    known = [side.metrics.temperatures.get(temperature) for side in (first, second) if side.metrics is not None]
    return list(dict.fromkeys(name for found in known if found is not None for name in found.domains))


def _tau(side: Evidence, temperature: str, domain: str) -> Measured | None:
    found = side.metrics.temperatures.get(temperature) if side.metrics is not None else None
    return found.domains[domain].tau if found is not None and domain in found.domains else None
