"""The charts of a study: tau over what varies, acceptance by position; of a sweep, acceptance and tau by threshold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dspark.report.chart import Axis, Figure, Panel, Point, Series
from dspark.report.drawing import render
from dspark.report.study import StudyReport, StudyVariant


def study_charts(report: StudyReport) -> Iterator[tuple[str, str]]:
    """File names and SVG texts, `study.svg` first."""
    for figure in study_figures(report):
        yield f"{figure.name}.svg", render(figure)


def study_figures(report: StudyReport) -> Iterator[Figure]:
    """The figures, `study` first."""
    return _of_sweep(report) if report.sweep is not None else _of_variants(report)


def _of_variants(report: StudyReport) -> Iterator[Figure]:
    foremost = report.axes[0]
    labels = list(dict.fromkeys(variant.choices[foremost] for variant in report.variants))
    of, domains = _named(report), ", ".join(report.domains)
    yield Figure(
        name="study",
        title=f"tau, {of}",
        caption=f"Each variant with its 95 % interval over prompts; domains {domains}.",
        x=Axis("variant", foremost, names=tuple(labels)),
        y=Axis("tau", "tau: tokens per cycle, with the bonus"),
        panels=(Panel("", tuple(_tau_lines(report, labels))),),
    )
    shown = report.temperatures[-1]  # the paper's protocol is temperature 1
    yield Figure(
        name="acceptance",
        title=f"acceptance by position, {of}",
        caption=f"Share of drafts accepted where all drafts before them in their block were, with its 95 % interval "
        f"over prompts; temperature {shown}, domains {domains}.",
        x=Axis("position", "draft position", whole=True),
        y=Axis("acceptance", "conditional acceptance", low=0, high=1),
        panels=(
            Panel(
                "",
                tuple(
                    Series(_choices(variant.choices.items()), _positions(variant, shown))
                    for variant in report.variants
                    if shown in variant.temperatures
                ),
            ),
        ),
    )


def _of_sweep(report: StudyReport) -> Iterator[Figure]:
    shown = report.temperatures[-1]
    of = _named(report)
    for name, key, title in (
        ("study", "acceptance_rate", "share of verified drafts that are accepted"),
        ("tau", "tau", "tau: tokens per cycle, with the bonus"),
    ):
        yield Figure(
            name=name,
            title=f"{title.partition(':')[0]}, {of}",
            caption=f"A block ends before its first draft whose confidence is below the threshold; temperature "
            f"{shown}, domains {', '.join(report.domains)}.",
            x=Axis("threshold", "confidence threshold"),
            y=Axis(key, title),
            panels=(Panel("", tuple(_sweep_lines(report, key, float(shown)))),),
        )


def _tau_lines(report: StudyReport, labels: Sequence[str]) -> list[Series]:
    """A line for each combination of the other axes and each temperature."""
    foremost, *others = report.axes
    grouped: dict[str, list[Point]] = {}
    for variant in report.variants:
        beside = [(axis, variant.choices[axis]) for axis in others]
        place = float(labels.index(variant.choices[foremost]))
        for temperature, found in variant.temperatures.items():
            name = _choices([*beside, ("temperature", temperature)])
            grouped.setdefault(name, []).append(Point(place, found.tau.value, found.tau.ci95))
    ordered = all(_is_number(label) or label == "none" for label in labels)
    return [Series(name, tuple(points), form="line" if ordered else "points") for name, points in grouped.items()]


def _positions(variant: StudyVariant, temperature: str) -> tuple[Point, ...]:
    rates = variant.temperatures[temperature].conditional
    return tuple(Point(float(k), rate.value, rate.ci95) for k, rate in enumerate(rates, start=1))


def _sweep_lines(report: StudyReport, key: str, temperature: float) -> list[Series]:
    grouped: dict[str, list[Point]] = {}
    for variant in report.variants:
        for row in variant.sweep:
            if row["temperature"] == temperature and row[key] is not None:
                name = _choices([*variant.choices.items(), ("", row["domain"])])
                grouped.setdefault(name, []).append(Point(row["threshold"], row[key]))
    return [Series(name, tuple(points)) for name, points in grouped.items()]


def _named(report: StudyReport) -> str:
    return f"study {report.study} of {report.build}"


def _choices(pairs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{axis} {label}".strip() for axis, label in pairs)


def _is_number(label: str) -> bool:
    try:
        float(label)
    except ValueError:
        return False
    return True
