"""What llama.cpp's server says about speculation: its Prometheus counters, and the draft tokens in its log."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dspark.errors import ServiceError

_PREFIX = "llamacpp:spec_decode_num_"
_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)\s*$", re.ASCII)
_POSITION = re.compile(r'position="(\d+)"')
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


@dataclass(frozen=True)
class Counters:
    """The server's totals since it started; the difference of two is what happened in between.

    Attributes:
        steps: verification steps of a drafted block. The first token of a reply and an undrafted last one are none.
        drafted: draft tokens that were verified; a block is cut to what the reply may still hold.
        accepted: of them.
        per_position: accepted tokens at each place of a block, as far as any were.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()

    def __sub__(self, other: Counters) -> Counters:
        """What was counted since `other`."""
        earlier = other.per_position + (0,) * (len(self.per_position) - len(other.per_position))
        counts = tuple(now - before for now, before in zip(self.per_position, earlier, strict=True))
        return Counters(
            self.steps - other.steps,
            self.drafted - other.drafted,
            self.accepted - other.accepted,
            without_zeros_at_the_end(counts),
        )

    @property
    def tau(self) -> float | None:
        """Tokens per step, the target's own included; None without a step."""
        return 1 + self.accepted / self.steps if self.steps else None


@dataclass(frozen=True)
class DraftedBlock:
    """A block as the log shows it.

    Attributes:
        slot: of the server.
        position: of the anchor in the sequence, 0-based.
        anchor: the last committed token.
        tokens: all that were drafted.
        offered: how many of them were verified.
    """

    slot: int
    position: int
    anchor: int
    tokens: tuple[int, ...]
    offered: int


@dataclass(frozen=True)
class Drafting:
    """How often blocks were drafted since the server started, and how long that took, the features' intake left out."""

    calls: int = 0
    seconds: float = 0.0

    def __sub__(self, other: Drafting) -> Drafting:
        """What was drafted since `other`."""
        return Drafting(self.calls - other.calls, self.seconds - other.seconds)


def parse_metrics(text: str) -> Counters:
    """The counters of speculation in what `/metrics` answers.

    Raises:
        ServiceError: they are not there.
    """
    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None or not sample["name"].startswith(_PREFIX):
            continue
        name, value = sample["name"].removeprefix(_PREFIX), int(float(sample["value"]))
        if place := _POSITION.search(sample["labels"] or ""):
            positions[int(place[1])] = value
        else:
            totals[name] = value
    wanted = ("drafts_total", "draft_tokens_total", "accepted_tokens_total")
    if missing := [name for name in wanted if name not in totals]:
        raise ServiceError(
            f"llama.cpp's /metrics lacks {', '.join(_PREFIX + name for name in missing)}",
            "use the version of xllamacpp that constraints.txt names, or start the server with --metrics",
        )
    counts = tuple(positions.get(place, 0) for place in range(max(positions, default=-1) + 1))
    steps, drafted, accepted = (totals[name] for name in wanted)
    return Counters(steps, drafted, accepted, without_zeros_at_the_end(counts))


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


def without_zeros_at_the_end(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Counts per position up to the last one that is not zero; the server leaves the others out or not, as it likes."""
    length = max((place + 1 for place, count in enumerate(counts) if count), default=0)
    return counts[:length]
