"""What llama.cpp's server says about speculation: its Prometheus counters, and the draft tokens in its log."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dspark.engines.client import DraftedBlock, Drafting
from dspark.engines.counters import Counters
from dspark.engines.prometheus import parse_samples, speculation_counters
from dspark.errors import ServiceError

METRICS = "llamacpp:spec_decode_num_"  # the counters of speculation begin so
# Log level 5 lists the best candidates of every slot of a block, before the block is cut to what may still be said.
_CANDIDATE = re.compile(
    r"^\S+ D\s+- seq_id (?P<slot>\d+), draft candidate\s+0, pos\s+(?P<at>\d+):\s+(?P<token>-?\d+) \("
)
_OFFERED = re.compile(
    r"^\S+ D slot .*: id\s+(?P<slot>\d+) \| task -?\d+ \| generate_draft: id=(?P<anchor>\d+), "
    r"#tokens=(?P<position>\d+), #draft=(?P<offered>\d+)"
)
_DRAFTING = re.compile(
    r"statistics .*#calls\(b,g,a\) =\s+\d+\s+(?P<calls>\d+)\s+\d+,"
    r".* dur\(b,g,a\) = [\d.]+, (?P<draft>[\d.]+), [\d.]+ ms"
)


def parse_metrics(text: str) -> Counters:
    """The counters of speculation in what `/metrics` answers.

    Raises:
        ServiceError: they are not there.
    """
    found, missing = speculation_counters(parse_samples(text), METRICS)
    if missing:
        raise ServiceError(
            f"llama.cpp's /metrics lacks {', '.join(f'{METRICS}{name}_total' for name in missing)}",
            "use the version of xllamacpp that constraints.txt names, or start the server with --metrics",
        )
    return found


def parse_blocks(lines: Iterable[str]) -> list[DraftedBlock]:
    """The drafted blocks in a log of level 5, in the order in which they were offered to the target.

    Raises:
        ServiceError: a block was offered whose candidates the log does not show.
    """
    blocks: list[DraftedBlock] = []
    waiting: dict[int, list[int]] = {}
    for line in lines:
        if candidate := _CANDIDATE.match(line):
            slot = int(candidate["slot"])
            if int(candidate["at"]) == 0:
                waiting[slot] = []
            waiting.setdefault(slot, []).append(int(candidate["token"]))
        elif offered := _OFFERED.match(line):
            slot, count = int(offered["slot"]), int(offered["offered"])
            tokens = tuple(waiting.pop(slot, ()))
            if len(tokens) < count:
                raise ServiceError(
                    f"llama.cpp's log shows {len(tokens)} candidates of a block of which {count} were offered",
                    "start the server with log level 5",
                )
            blocks.append(DraftedBlock(slot, int(offered["position"]), int(offered["anchor"]), tokens, count))
    return blocks


def parse_drafting(lines: Iterable[str]) -> Drafting:
    """The last totals of drafting in a log of level 4 or more; zeros where none were written."""
    found = [match for line in lines if (match := _DRAFTING.search(line))]
    return Drafting(int(found[-1]["calls"]), float(found[-1]["draft"]) / 1000) if found else Drafting()
