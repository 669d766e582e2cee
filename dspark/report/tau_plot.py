"""tau of every domain at every temperature, with its interval."""

from __future__ import annotations

from dspark.errors import DataError
from dspark.evaluation.results import EvaluationMetrics
from dspark.report.chart import Axis, Figure, Panel, Point, Series

_ROLES = {"training": "trained on", "evaluation_only": "not trained on"}


def tau_figure(metrics: EvaluationMetrics) -> Figure:
    """A panel for each temperature; domains that were trained on and others are told apart.

    Raises:
        DataError: no domain was decoded.
    """
    domains = tuple(dict.fromkeys(name for found in metrics.temperatures.values() for name in found.domains))
    panels = []
    for temperature, found in metrics.temperatures.items():
        by_role: dict[str, list[Point]] = {}
        for name, domain in found.domains.items():
            tau = domain.tau
            point = Point(domains.index(name), tau.value, tau.ci95, tau.n)
            by_role.setdefault(_ROLES[domain.role], []).append(point)
        series = tuple(Series(role, tuple(points), form="points") for role, points in by_role.items())
        panels.append(Panel(f"temperature {temperature} ({found.label.replace('_', ' ')})", series))
    if not domains:
        raise DataError("no domain was decoded")
    return Figure(
        name="tau",
        title="Tokens per cycle by domain",
        caption="tau of the sequential decoding loop, the bonus token included, whole blocks verified: without drafts "
        f"it would be 1, and it cannot exceed gamma + 1 = {metrics.gamma + 1}. Bars are 95 % intervals over prompts.",
        x=Axis("domain", "domain", names=domains),
        y=Axis("tau", "tokens per cycle", low=1),
        panels=tuple(panels),
        columns=min(len(panels), 3),
    )
