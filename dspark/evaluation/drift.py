"""A server's live acceptance against a certificate: has the traffic moved, or the engine? numpy only.

What a server counts is compared with the traffic that was certified, domains in their certified proportions. The two
differ by chance too; `FALSE_ALARMS` is how often an unchanged server with such traffic is said to have drifted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from dspark.decoding.policies import Fixed
from dspark.decoding.records import RecordSet
from dspark.engines.scrape import Scrape
from dspark.evaluation.certified import Certified, certified_acceptance
from dspark.evaluation.dispersion import (
    LENGTHS,
    Z95,
    Spread,
    critical,
    spread_of_interval,
    spread_of_position,
    spread_of_tau,
    variance_of,
)
from dspark.evaluation.entry import CertificateEntry
from dspark.evaluation.mixture import Mixture, explain
from dspark.evaluation.results import Model
from dspark.measured import Measured

FALSE_ALARMS = 0.01  # of a whole check, both sides and all quantities: half for tau, the rest for the places together
FEWEST_REQUESTS = 20  # below, the mean over requests is not yet normal
FEWEST_OUTCOMES = 10  # accepted and refused each, at a place
# Of the drafts of whole blocks, what must have been verified to call them whole. llama.cpp cuts a reply's last blocks:
# on SmolLM2 with gamma = 4, replies of 24 tokens keep 0.88 and a p_min of 0.5 leaves 0.56.
WHOLE = {"llamacpp": 0.8, "vllm": 0.98}
OUTSIDE = 0.15  # of llama.cpp's tokens: one or two of each reply come without a block; of 16 tokens that is an eighth

Verdict = Literal["within", "below", "above", "not comparable"]


class Quantity(Model):
    """One number of a server against the certificate's."""

    name: str  # `tau`, or `acceptance at 2`: given that the places before were accepted
    verdict: Verdict
    reason: str | None = None  # why it is not comparable
    live: Measured | None = None  # n: requests
    unsure: float = 0.0  # what the live value may lack, since the engine does not count it
    certified: Measured | None = None
    more_requests: int | None = None  # until such a difference would be told from chance; None: no number would do
    detectable: float | None = None  # the smallest difference that a window of this size mostly shows


class Window(Model):
    """What the live numbers are of."""

    kind: Literal["since the server started", "between two scrapes", "since a restart between the scrapes"]
    steps: int
    requests: int
    tokens: int
    seconds: float | None = None


class Drift(Model):
    """The comparison itself; `workspace.drift` adds the engine."""

    verdict: Literal["within", "drifted", "not comparable"]
    window: Window
    quantities: tuple[Quantity, ...]
    mixture: Mixture | None = None  # only where something has drifted
    false_alarms: float = Field(default=FALSE_ALARMS)
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class _Pair:
    """Two sides of a quantity.

    Attributes:
        name: of the quantity.
        live: pooled, and how much may be missing in it.
        units: of the live ratio's denominator.
        certified: as certified, and how much may be missing in it.
        spread: between requests, and between units.
        alarms: probability that chance passes for drift.
    """

    name: str
    live: tuple[float, float]
    units: int
    certified: tuple[Measured, float]
    spread: Spread
    alarms: float


def judge_drift(
    live: Scrape,
    window: Window,
    entry: CertificateEntry,
    gamma: int,
    *,
    served_gamma: int | None = None,
    records: RecordSet | None = None,
) -> Drift:
    """Whether a server accepts what was certified.

    Args:
        live: what it counted.
        window: what that is of.
        entry: of the certificate.
        gamma: of the drafter.
        served_gamma: of the server, if it says so.
        records: of single prompts, whole blocks verified at the certificate's temperature; None: there are none.
    """
    names = ("tau", *(f"acceptance at {place}" for place in range(1, gamma + 1)))
    reason = not_comparable(live, entry, gamma, served_gamma)
    if reason is not None:
        quantities = [Quantity(name=name, verdict="not comparable", reason=reason) for name in names]
        return _drift(window, quantities, None, _assumptions(live, entry, None))
    certified = certified_acceptance(entry, gamma, cut=live.engine == "llamacpp", records=records)
    tau = _pair_of_tau(live, certified, gamma, records)
    quantities = [_tau(tau, live.requests)]
    whole = entry.workload is not None and entry.workload.policy == Fixed().name
    for place in range(gamma):
        quantities.append(_place(live, certified, gamma, place, records, whole))
    moved = any(one.verdict in ("below", "above") for one in quantities)
    mixture = None
    if moved and quantities[0].live is not None and entry.acceptance:
        survival = None if live.per_position is None else [count / live.steps for count in live.per_position]
        mixture = explain(quantities[0].live, survival, entry.acceptance)
    return _drift(window, quantities, mixture, _assumptions(live, entry, tau.spread))


def not_comparable(live: Scrape, entry: CertificateEntry, gamma: int, served_gamma: int | None = None) -> str | None:
    """Why nothing that a server counts can be held against an entry; None: it can."""
    policy = entry.workload.policy if entry.workload is not None else Fixed().name
    if entry.status != "measured":
        return f"the certificate's entry {entry.profile} is {entry.status}: {entry.reason}"
    if not live.tokens and not live.steps:
        return "the server generated nothing in this window: wait for traffic"
    if not live.steps:
        return f"speculation is off: {live.tokens} tokens were generated, and no block was verified"
    if served_gamma not in (None, gamma):
        return f"the server drafts blocks of {served_gamma}, the drafter's gamma is {gamma}"
    shortened = _shortened(live, gamma)
    if shortened and policy == Fixed().name:
        return f"{shortened}; certified were whole blocks, and what is left out is neither accepted nor refused"
    if policy != Fixed().name and not shortened:
        return f"the server verifies whole blocks, certified was policy {policy}"
    return None


def _shortened(live: Scrape, gamma: int) -> str | None:
    """How it shows that less than whole blocks were verified."""
    if live.window is not None and 0 < live.window < gamma + 1 - 0.005:
        return f"a scheduler let {live.window - 1:.2f} of {gamma} drafts be verified in a step"
    if live.engine == "llamacpp" and live.outside > OUTSIDE * live.tokens:
        return f"{live.outside} of {live.tokens} tokens came without a drafted block, by confidence or a lower limit"
    share = live.drafted / (gamma * live.steps) if live.drafted is not None else 1.0
    if share < WHOLE.get(live.engine, 0.0):
        return f"{share * gamma:.2f} of {gamma} drafts were verified in a step, by confidence, load or a lower limit"
    return None


def _pair_of_tau(live: Scrape, certified: Certified, gamma: int, records: RecordSet | None) -> _Pair:
    spread = (spread_of_tau(records) if records is not None else None) or spread_of_interval(certified.tau)
    unsure = live.cut_replies * gamma / live.steps + certified.lost_tokens(_not_verified(live, gamma))
    return _Pair(
        "tau",
        (1 + live.accepted / live.steps, unsure),
        live.steps,
        (certified.tau, certified.lost_tokens(certified.not_verified)),
        spread,
        FALSE_ALARMS / 2,
    )


def _not_verified(live: Scrape, gamma: int) -> float:
    """Drafts of a block that were not verified, on average; 0 where the engine does not say."""
    return max(0.0, gamma - live.drafted / live.steps) if live.drafted is not None else 0.0


def _tau(pair: _Pair, requests: int) -> Quantity:
    if requests < FEWEST_REQUESTS:
        return Quantity(
            name=pair.name,
            verdict="not comparable",
            reason=f"{requests} requests have ended, {FEWEST_REQUESTS} are the fewest that tell something",
            certified=pair.certified[0],
            more_requests=FEWEST_REQUESTS - requests,
        )
    return _judge(pair, requests)


def _place(
    live: Scrape, certified: Certified, gamma: int, place: int, records: RecordSet | None, whole: bool
) -> Quantity:
    """Acceptance at a place, given that the places before it were accepted."""
    name = f"acceptance at {place + 1}"
    rate = certified.conditional[place] if place < len(certified.conditional) else None

    def refused(reason: str, more: int | None = None) -> Quantity:
        return Quantity(name=name, verdict="not comparable", reason=reason, certified=rate, more_requests=more)

    if live.per_position is None:
        return refused(f"{live.engine} does not count by place")
    if not whole:
        return refused("under a scheduler the counts do not say which places were verified")
    if rate is None:
        return refused("the certificate has no acceptance at this place")
    counts = (live.steps, *live.per_position, *(0 for _ in range(gamma - len(live.per_position))))
    reached, accepted = counts[place], counts[place + 1]
    expected = reached * min(rate.value, 1 - rate.value)
    if live.requests < FEWEST_REQUESTS or expected < FEWEST_OUTCOMES:
        needed = live.requests * FEWEST_OUTCOMES / expected if expected and live.requests else None
        more = None if needed is None else max(FEWEST_REQUESTS, math.ceil(needed)) - live.requests
        return refused(f"only {reached} blocks reached it", more)
    spread = (spread_of_position(records, place) if records is not None else None) or spread_of_interval(rate)
    missing = [certified.lost_at(place, lost) for lost in (_not_verified(live, gamma), certified.not_verified)]
    pair = _Pair(name, (accepted / reached, missing[0]), reached, (rate, missing[1]), spread, FALSE_ALARMS / 2 / gamma)
    return _judge(pair, live.requests)


def _judge(pair: _Pair, requests: int) -> Quantity:
    """Below or above only if chance, and all that is not counted, leave no other reading."""
    (value, unsure), (certified, lost) = pair.live, pair.certified
    own, theirs = pair.spread.variance(pair.units, requests), variance_of(certified)
    least = critical(pair.alarms, min(pair.spread.prompts, certified.n))
    bound = least * math.sqrt(own + theirs) if math.isfinite(least) else math.inf
    lowest, highest = value - certified.value - lost, value + unsure - certified.value
    verdict: Verdict = "below" if highest < -bound else "above" if lowest > bound else "within"
    error = Z95 * math.sqrt(own)
    shown = {
        "name": pair.name,
        "live": Measured(value=value, n=requests, ci95=(value - error, value + unsure + error)),
        "unsure": unsure,
        "certified": certified,
    }
    if not math.isfinite(bound):
        reason = f"the certificate rests on {certified.n} prompts, too few to tell chance from drift"
        return Quantity(verdict="not comparable", reason=reason, **shown)
    return Quantity(
        verdict=verdict,
        more_requests=0 if verdict != "within" else _more(max(lowest, -highest), least, own, theirs, requests),
        # What is missed in one window of five: 0.84 standard errors beyond the bound.
        detectable=bound + 0.84 * math.sqrt(own + theirs) + max(unsure, lost),
        **shown,
    )


def _more(difference: float, least: float, own: float, theirs: float, requests: int) -> int | None:
    """Requests beyond these until such a difference would pass for drift; the certificate's own error stays."""
    room = (difference / least) ** 2 - theirs
    if difference <= 0 or room <= 0:
        return None
    return max(0, math.ceil(requests * own / room) - requests)


def _drift(
    window: Window, quantities: Sequence[Quantity], mixture: Mixture | None, assumptions: Iterator[str]
) -> Drift:
    verdicts = {one.verdict for one in quantities}
    found: Literal["within", "drifted", "not comparable"] = "within"
    if verdicts & {"below", "above"}:
        found = "drifted"
    elif quantities[0].verdict == "not comparable":
        found = "not comparable"
    return Drift(
        verdict=found, window=window, quantities=tuple(quantities), mixture=mixture, assumptions=tuple(assumptions)
    )


def _assumptions(live: Scrape, entry: CertificateEntry, spread: Spread | None) -> Iterator[str]:
    """What counters cannot show."""
    if entry.workload is not None:
        temperature = entry.workload.sampling.temperature
        yield f"the traffic is sampled at temperature {temperature:g}, as certified: counters do not tell"
        if entry.workload.policy != Fixed().name:
            yield f"the server runs policy {entry.workload.policy}, as certified: counters do not tell"
    if spread is not None:
        where = "single prompts in the evidence" if spread.source == "records" else "the certificate's intervals"
        yield (
            f"requests differ from each other as {spread.prompts} prompts did ({where}), and in length as much as an "
            f"exponential distribution (squared coefficient of variation {LENGTHS:g})"
        )
        yield "the normal approximation; domains in their certified proportions"
    if live.engine == "llamacpp":
        yield "llama.cpp counts no requests: at least so many, by its tokens, if every step drafts"
    if live.cut_replies:
        yield "drafts behind a reply's end are not counted: up to gamma of each request may be missing (`unsure`)"
