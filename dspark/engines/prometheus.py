"""Prometheus' text format, as far as engines' counters need it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dspark.engines.counters import Counters, without_zeros_at_the_end

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\d+)?\s*$", re.ASCII)
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"', re.ASCII)


@dataclass(frozen=True)
class Sample:
    """One line: a metric's value under some labels."""

    name: str
    labels: dict[str, str]
    value: float


def parse_samples(text: str) -> Iterator[Sample]:
    """All samples of a text; comments, and lines that are none, are passed over."""
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        yield Sample(found["name"], dict(_LABEL.findall(found["labels"] or "")), value)


def speculation_counters(samples: Iterable[Sample], prefix: str) -> tuple[Counters, tuple[str, ...]]:
    """The totals of speculation as llama.cpp and vLLM count it, all label sets of a name together.

    Args:
        prefix: of their names, such as `vllm:spec_decode_num_`.
    Returns:
        the counters, and which of `drafts`, `draft_tokens` and `accepted_tokens` are missing; they count as 0.
    """
    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for sample in samples:
        if not sample.name.startswith(prefix) or sample.name.endswith("_created") or not math.isfinite(sample.value):
            continue
        name = sample.name.removeprefix(prefix).removesuffix("_total")
        if name != "accepted_tokens_per_pos":
            totals[name] = totals.get(name, 0) + int(sample.value)
        elif (place := sample.labels.get("position", "")).isdecimal():
            positions[int(place)] = positions.get(int(place), 0) + int(sample.value)
    wanted = ("drafts", "draft_tokens", "accepted_tokens")
    steps, drafted, accepted = (totals.get(name, 0) for name in wanted)
    counts = tuple(positions.get(place, 0) for place in range(max(positions, default=-1) + 1))
    counters = Counters(steps, drafted, accepted, without_zeros_at_the_end(counts))
    return counters, tuple(name for name in wanted if name not in totals)
