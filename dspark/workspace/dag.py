"""`dspark dag`: the stages and which reads what another writes, for one build or for any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark.config.build import ResolvedBuild
from dspark.config.stages import STAGES
from dspark.workspace.graph import Instance, feeds, instances

_ANY = dict.fromkeys(("target", "corpus", "build", "geometry", "profile"), "any")


@dataclass(frozen=True)
class Dag:
    """Stages in an order in which they can run.

    Attributes:
        nodes: their names.
        edges: pairs (is read, reads), by names.
    """

    nodes: tuple[str, ...]
    edges: tuple[tuple[str, str], ...]

    def read_by(self, name: str) -> list[str]:
        """The stages whose output a stage reads."""
        return [before for before, after in self.edges if after == name]

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {"schema": "dspark/dag/1", "stages": list(self.nodes), "edges": [list(edge) for edge in self.edges]}


def dag_of(resolved: ResolvedBuild) -> Dag:
    """The stages of a build, `stage@key`."""
    return _dag({instance.name: instance for instance in instances(resolved)})


def dag_of_stages() -> Dag:
    """The ten stages as such, whatever the build."""
    return _dag({stage.name: Instance(stage, "any", _ANY) for stage in STAGES})


def _dag(found: Mapping[str, Instance]) -> Dag:
    edges = [
        (name, other)
        for other, downstream in found.items()
        for name, upstream in found.items()
        if name != other and feeds(upstream, downstream)
    ]
    return Dag(tuple(found), tuple(edges))
