"""Is a drafter worth deploying, where, and by how much: one answer for the report and for the end of a run.

From what the certificates recommend and the checks of losslessness; nothing is judged anew. A serving profile whose
certificate has run out, or that was not measured, counts neither way.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from dspark.evaluation.entry import AgainstNone, CertificateEntry, Recommendation
from dspark.evaluation.results import LosslessReport, ThroughputReport
from dspark.measured import Measured
from dspark.package.certificate import NONE
from dspark.report.words import interval

Answer = Literal["deploy", "leave off", "do not deploy", "not known"]
_Standing = Answer | Literal["too few rounds"]  # of one serving profile


@dataclass(frozen=True)
class Verdict:
    """The answer.

    Attributes:
        answer: `leave off`: it was measured and did not pay; `do not deploy`: it is not what it should be.
        headline: one sentence, without a full stop.
        lines: what it rests on: one for each serving profile, then what else must be known.
        paying: the serving profiles on which it is worth deploying; on no other it is to be served.
    """

    answer: Answer
    headline: str
    lines: tuple[str, ...]
    paying: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


@dataclass(frozen=True)
class Span:
    """Neighbouring ranges of concurrency with one recommended policy, and its ratios that were measured in them."""

    first: int
    last: int
    policy: str
    ratios: tuple[AgainstNone, ...]
    decided: bool  # False: too few rounds to tell what pays

    @property
    def requests(self) -> str:
        """`1 request at a time`, `2 to 4 concurrent requests`."""
        if self.first == self.last:
            return "1 request at a time" if self.first == 1 else f"{self.first} concurrent requests"
        return f"{self.first} to {self.last} concurrent requests"


def verdict(
    entries: Sequence[CertificateEntry],
    lossless: LosslessReport | None,
    throughput: ThroughputReport | None,
    *,
    today: datetime.date,
) -> Verdict:
    """The answer from everything that was certified.

    Args:
        entries: of all serving profiles.
        lossless: of the evaluation; None: it was not checked.
        throughput: of the evaluation; None: it was not measured.
        today: certificates that ended before do not count.
    """
    standings = [(entry, *_standing(entry, today)) for entry in entries]
    lines = tuple(f"{entry.profile}: {text}" for entry, _, text in standings)
    lines += (*_text_lines(lossless), *_speed_lines(throughput))
    if lossless is not None and lossless.result == "fail":
        headline = "Do not deploy: its text is not surely the target's, a check of losslessness failed"
        return Verdict("do not deploy", headline, lines)
    paying = [entry for entry, answer, _ in standings if answer == "deploy"]
    refused = [(entry.profile, text) for entry, answer, text in standings if answer == "do not deploy"]
    if paying:
        # What one engine does wrong is no reason against another one; but nobody is to serve it there by mistake.
        but = f"; do not deploy on {', '.join(profile for profile, _ in refused)}" if refused else ""
        headline = f"Worth deploying {'; '.join(map(_gain, paying))}{but}"
        return Verdict("deploy", headline, lines, tuple(entry.profile for entry in paying))
    if refused:
        profile, text = refused[0]
        return Verdict("do not deploy", f"Do not deploy: on {profile} {text}", lines)
    answers = {answer for _, answer, _ in standings}
    if "leave off" in answers:
        headline = "Not worth deploying: where it was measured, nothing surely beat plain decoding"
        return Verdict("leave off", headline, lines)
    if "too few rounds" in answers:
        return Verdict("not known", "Not known whether it pays: too few rounds were timed to tell", lines)
    return Verdict("not known", "Not known whether it pays: no valid certificate of a serving engine", lines)


def spans(entry: CertificateEntry) -> list[Span]:
    """What an entry recommends, neighbours of one policy as one."""
    found: list[Span] = []
    for item in entry.recommended:
        ratios = _ratios(entry, item)
        span = Span(item.from_concurrency, item.to_concurrency, item.policy, ratios, item.decided)
        last = found[-1] if found else None
        alike = last is not None and (last.policy, last.decided) == (span.policy, span.decided)
        if last is not None and alike and last.last + 1 == span.first:
            found[-1] = replace(span, first=last.first, ratios=(*last.ratios, *ratios))
        else:
            found.append(span)
    return found


def _times(ratio: Measured) -> str:
    return interval(ratio, 2)


def _standing(entry: CertificateEntry, today: datetime.date) -> tuple[_Standing, str]:
    """What one serving profile says, in one sentence."""
    if entry.status == "absent":
        return "not known", f"not measured ({entry.reason})"
    if entry.lossless is not None and entry.lossless.result == "fail":
        return "do not deploy", "losslessness failed in the engine, its texts with drafts are not those without"
    if entry.status == "disagrees":
        return "do not deploy", f"evaluation and engine disagree, do not rely on it ({entry.reason})"
    if entry.status == "inconclusive":
        return "not known", f"inconclusive ({entry.reason})"
    end = entry.holds_until
    if end is not None and datetime.date.fromisoformat(end.date) < today:
        return "not known", f"the certificate ran out on {end.date}: measure again"
    if not entry.recommended:
        return "leave off", "nothing was shown to pay, leave speculation off"
    told = "; ".join(_advice(entry, span) for span in spans(entry))
    if any(item.policy != NONE for item in entry.recommended):
        return "deploy", told
    # What was judged and did not pay is known, whatever could not be judged beside it.
    return ("leave off" if any(item.decided for item in entry.recommended) else "too few rounds"), told


def _advice(entry: CertificateEntry, span: Span) -> str:
    if span.policy != NONE:
        return f"at {span.requests} use policy {span.policy}, {_told(span.ratios)}"
    best = _best(entry, span)
    advice = "switch speculation off" if span.decided else "too few rounds were timed to tell whether it pays"
    if best is None:
        return f"at {span.requests} {advice}"
    told = f"{best.arm} at {_requests(best.concurrency)}: {_times(best.ratio)} times plain decoding"
    return f"at {span.requests} {advice} ({told})"


def _told(ratios: Sequence[AgainstNone]) -> str:
    if not ratios:
        return "whose ratio to plain decoding is not known"
    units = (" times plain decoding's tokens/s", *[""] * (len(ratios) - 1))
    return ", ".join(
        f"{_times(one.ratio)}{unit} at {_requests(one.concurrency)} (n = {one.ratio.n})"
        for one, unit in zip(ratios, units, strict=True)
    )


def _requests(concurrency: int) -> str:
    return f"{concurrency} request{'s' if concurrency > 1 else ''}"


def _gain(entry: CertificateEntry) -> str:
    """Where and by how much, of an entry that recommends a policy: the range with the largest gain."""
    paying = [span for span in spans(entry) if span.policy != NONE]
    known = [(one.ratio.value, span, one) for span in paying for one in span.ratios]
    if not known:
        return f"on {entry.profile} at {paying[0].requests} (by how much is not known)"
    _, span, one = max(known, key=lambda item: item[0])
    more = f" at {_requests(one.concurrency)}" if span.first != span.last else ""
    return f"on {entry.profile} at {span.requests}: {_times(one.ratio)} times plain decoding{more}"


def _ratios(entry: CertificateEntry, item: Recommendation) -> tuple[AgainstNone, ...]:
    return tuple(
        one
        for one in entry.against_none
        if one.policy == item.policy and item.from_concurrency <= one.concurrency <= item.to_concurrency
    )


def _best(entry: CertificateEntry, span: Span) -> AgainstNone | None:
    """The fastest arm where plain decoding is recommended: how far it is from paying."""
    there = [one for one in entry.against_none if span.first <= one.concurrency <= span.last]
    return max(there, key=lambda one: one.ratio.value, default=None)


def _text_lines(lossless: LosslessReport | None) -> Iterator[str]:
    if lossless is None:
        yield "losslessness: not checked"
        return
    greedy = lossless.greedy
    yield (
        f"losslessness: {lossless.result} ({greedy.tokens} greedy tokens of {greedy.n} prompts, "
        f"{len(greedy.violations)} violations)"
    )


def _speed_lines(throughput: ThroughputReport | None) -> Iterator[str]:
    """The evaluation's own ratios: dspark's loop is no engine that serves."""
    known = [(name, arm.against_none) for name, arm in throughput.arms.items()] if throughput is not None else []
    told = [f"{name} {_times(ratio)} (n = {ratio.n})" for name, ratio in known if ratio is not None]
    if told:
        yield f"in the evaluation, which is no serving engine, against plain decoding: {', '.join(told)}"
