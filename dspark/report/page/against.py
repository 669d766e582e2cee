"""The section that sets a build or package beside another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dspark.evaluation.entry import CertificateEntry
from dspark.measured import Measured
from dspark.report.chart import Axis, Figure, Panel, Point, Series
from dspark.report.page.compare import Difference, differences
from dspark.report.page.evidence import Evidence
from dspark.report.page.model import Block, Chart, Code, Facts, Group, Missing, Paragraph, Section, Table
from dspark.report.page.origin import settings_of
from dspark.report.words import NOTHING, count, interval, percent


def against(first: Evidence, second: Evidence) -> Section:
    """Tokens per cycle in pairs, throughput as far as one run measured both, settings that differ."""
    mine, theirs = _labels(first, second)
    found = differences(first, second)
    blocks: list[Block] = [Facts(((mine, _named(first)), (theirs, _named(second))))]
    if found:
        blocks.append(_taus(found, mine, theirs))
    else:
        blocks.append(Missing("tokens per cycle", "neither side was evaluated"))
    if any(item.relative is not None for item in found):
        blocks.append(Chart(_figure(found, mine, theirs)))
    blocks += _throughput(first, second, mine, theirs)
    blocks += _settings(first, second, mine, theirs)
    return Section("against", f"Against {theirs}", tuple(blocks))


def _labels(first: Evidence, second: Evidence) -> tuple[str, str]:
    names = (first.files.name, second.files.name)
    if names[0] != names[1]:
        return names
    digests = [(side.digest or "not packaged")[:12] for side in (first, second)]
    return f"{names[0]} ({digests[0]})", f"{names[1]} ({digests[1]})"


def _named(side: Evidence) -> Code | str:
    return Code(side.digest) if side.digest is not None else "no package yet"


def _taus(found: Sequence[Difference], mine: str, theirs: str) -> Table:
    bases = {item.basis for item in found}
    same = len(bases) == 1
    rows = tuple(
        (
            item.temperature,
            item.domain,
            interval(item.first),
            interval(item.second),
            percent(item.relative),
            count(item.relative),
            *(() if same else (item.basis,)),
        )
        for item in found
    )
    return Table(
        "Tokens per cycle, prompt by prompt",
        ("temperature", "domain", mine, theirs, "difference", "n prompts", *(() if same else ("pairs",))),
        rows,
        f"The difference is {mine} / {theirs} - 1 on the prompts that both decoded, with its 95 % interval over pairs; "
        f"each tau is over all prompts of its own evaluation.{f' Pairs: {bases.pop()}.' if same else ''}",
    )


def _figure(found: Sequence[Difference], mine: str, theirs: str) -> Figure:
    domains = tuple(dict.fromkeys(item.domain for item in found))
    panels = []
    for temperature in dict.fromkeys(item.temperature for item in found):
        pairs = [(item.domain, item.relative) for item in found if item.temperature == temperature]
        points = tuple(_point(domains.index(domain), pair) for domain, pair in pairs if pair is not None)
        none = Series("no difference", (Point(-0.25, 0), Point(len(domains) - 0.75, 0)), reference=True)
        panels.append(Panel(f"temperature {temperature}", (none, Series("difference", points, form="points"))))
    return Figure(
        name="against",
        title=f"Tokens per cycle of {mine} against {theirs}",
        caption="Relative difference in percent on the same prompts; above the dashed line is better. Bars are 95 % "
        "intervals over pairs of prompts.",
        x=Axis("domain", "domain", names=domains),
        y=Axis("difference_percent", "difference in %"),
        panels=tuple(panels),
        columns=min(len(panels), 3),
    )


def _point(place: int, difference: Measured) -> Point:
    low, high = (100 * bound for bound in difference.ci95)
    return Point(place, 100 * difference.value, (low, high), difference.n)


def _throughput(first: Evidence, second: Evidence, mine: str, theirs: str) -> Iterator[Block]:
    """Ratios of one run where there are some; else both sides' own ratios, which decide nothing."""
    for profile, entry in first.entries.items():
        champion = entry.against_champion
        if champion is not None and champion.package_digest == second.digest:
            yield Table(
                f"Tokens/s on {profile}, in the same rounds",
                ("requests", f"policy of {mine}", f"policy of {theirs}", "ratio", "n"),
                tuple(
                    (str(one.concurrency), one.policy, one.champion_policy, interval(one.ratio), count(one.ratio))
                    for one in champion.ratios
                ),
            )
        elif profile in second.entries:
            yield _apart(profile, entry, second.entries[profile], mine, theirs)
        else:
            yield Missing(f"tokens/s on {profile}", f"{theirs} was not certified there")


def _apart(profile: str, first: CertificateEntry, second: CertificateEntry, mine: str, theirs: str) -> Block:
    sides = [{(one.concurrency, one.arm): one.ratio for one in entry.against_none} for entry in (first, second)]
    keys = sorted({*sides[0], *sides[1]})
    if not keys:
        return Missing(f"tokens/s on {profile}", "neither side was measured there")
    return Table(
        f"Times plain decoding on {profile}, in different runs",
        ("requests", "arm", mine, "n", theirs, "n"),
        tuple(
            (
                str(requests),
                arm,
                *(
                    cell
                    for side in sides
                    for cell in (interval(side.get((requests, arm)), 2), count(side.get((requests, arm))))
                ),
            )
            for requests, arm in keys
        ),
        "Timings of two runs: to look at, not to decide by. A build that names the other package as `against` measures "
        "both in the same rounds.",
    )


def _settings(first: Evidence, second: Evidence, mine: str, theirs: str) -> Iterator[Block]:
    manifests = [side.files.manifest for side in (first, second)]
    if manifests[0] is None or manifests[1] is None:
        without = [name for name, manifest in zip((mine, theirs), manifests, strict=True) if manifest is None]
        yield Missing("settings that differ", f"{' and '.join(without)}: no package that says how it was made")
        return
    one, other = settings_of(manifests[0]), settings_of(manifests[1])
    rows = tuple(
        (name, one.get(name, NOTHING), other.get(name, NOTHING))
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    )
    if rows:
        yield Group(
            "Settings that differ", (Table("Settings that differ", ("setting", mine, theirs), rows),), folded=True
        )
    else:
        yield Paragraph("No setting differs.")
