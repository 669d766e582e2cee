"""What a report tells of a build or package, in the order in which a reader asks: does it pay, where, why, of what."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Iterator

from dspark.evaluation.rounds import ENOUGH
from dspark.report.page.against import against
from dspark.report.page.drafts import acceptance, confidence, training
from dspark.report.page.evidence import Evidence
from dspark.report.page.model import Block, Cell, Code, Facts, Missing, Page, Section, Step
from dspark.report.page.origin import origin, outdated
from dspark.report.page.serving import certificates, speed
from dspark.report.page.soundness import soundness
from dspark.report.verdict import Verdict, verdict


def tell(evidence: Evidence, other: Evidence | None = None, *, today: datetime.date) -> Page:
    """The whole report.

    Args:
        other: what it is compared with.
        today: certificates that ended before do not count.
    """
    metrics = evidence.metrics
    answer = verdict(
        list(evidence.entries.values()),
        evidence.lossless,
        metrics.throughput if metrics is not None else None,
        today=today,
    )
    sections = [
        certificates(evidence),
        *([against(evidence, other)] if other is not None else []),
        speed(evidence),
        acceptance(evidence),
        confidence(evidence),
        soundness(evidence),
        training(evidence),
        origin(evidence),
    ]
    absent = _absent(evidence)
    if absent:
        sections.append(_missing(absent))
    return Page(
        title=evidence.files.name,
        subtitle=_subtitle(evidence),
        verdict=answer,
        steps=tuple(steps(evidence, answer)),
        facts=Facts(tuple(_facts(evidence))),
        sections=tuple(sections),
        absent=absent,
    )


def steps(evidence: Evidence, answer: Verdict) -> Iterator[Step]:
    """The commands that come next, the most useful one first."""
    files, build = evidence.files, shlex.quote(evidence.files.build)
    if files.manifest is None or files.package is None:
        yield Step("make the package", f"dspark run --build {build}")
        return
    package = shlex.quote(files.package)
    if files.is_build:
        yield _in_the_workspace(evidence, answer, build)
    digest = f" --digest {evidence.digest}" if files.is_build else ""
    yield Step("check every byte of the package", f"dspark package verify {package}{digest}")
    listed = {entry.path for entry in files.manifest.files}
    for entry in evidence.entries.values():
        launch = f"engines/{entry.fingerprint.get('engine')}/launch.sh"
        if launch in listed and entry.profile in answer.paying:
            yield Step(f"serve it as on {entry.profile}", f"bash {package}/{launch}")


def _in_the_workspace(evidence: Evidence, answer: Verdict, build: str) -> Step:
    if answer.answer == "deploy":
        return Step("ask the gates, and change nothing yet", f"dspark promote {build} --to production --dry-run")
    if answer.answer == "not known":
        if any(not item.decided for entry in evidence.entries.values() for item in entry.recommended):
            enough = f"dspark run --build {build} --set evaluation.throughput_rounds={ENOUGH}"
            return Step("time enough rounds to tell whether it pays", enough)
        return Step("see which engines can be measured here, and why others cannot", "dspark profiles list")
    return Step("see every setting that could be changed", f"dspark plan --build {build} --settings")


def _subtitle(evidence: Evidence) -> str:
    manifest = evidence.files.manifest
    if manifest is None:
        return "A drafter for speculative decoding whose package is not made yet."
    drafter = manifest.drafter
    return (
        f"A {drafter.family} drafter for speculative decoding with {manifest.inputs.target.public_id}: "
        f"{drafter.parameters:,} parameters, blocks of gamma = {drafter.gamma} tokens."
    )


def _facts(evidence: Evidence) -> Iterator[tuple[str, Cell]]:
    files = evidence.files
    if files.manifest is None:
        yield "package", "none yet"
        return
    if files.package is not None:
        yield "package", Code(files.package)
    yield "package digest", Code(files.manifest.digests.package_digest)
    yield "model digest", Code(files.manifest.digests.model_digest)


def _absent(evidence: Evidence) -> dict[str, str]:
    """Everything that a reader might miss; what an evaluation says of itself stands in its section."""
    figures = {f"figure {name}": reason for name, reason in evidence.drawn.absent.items()}
    entries = {
        f"serving profile {entry.profile}": entry.reason or "no reason is given"
        for entry in evidence.entries.values()
        if entry.status == "absent"
    }
    late = outdated(evidence)
    return {**evidence.absent, **entries, **figures, **({late.what: late.reason} if late is not None else {})}


def _missing(absent: dict[str, str]) -> Section:
    blocks: tuple[Block, ...] = tuple(Missing(name, reason) for name, reason in absent.items())
    return Section("missing", "What is missing", blocks)
