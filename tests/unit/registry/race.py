"""Two processes that promote at the same moment, round after round, in whatever registry an address names."""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from multiprocessing import Barrier
from pathlib import Path
from typing import Any

from dspark.errors import GateError
from dspark.io.progress import Progress
from dspark.package.verify import read_manifest
from dspark.registry.connection import connected
from dspark.registry.gate_report import GateReport, GateRow
from dspark.registry.promotion import Author, promote
from dspark.registry.stages import read_chain, settled, versions

VERSIONS = (1, 2, 3)
_PATIENCE = 300.0


@dataclass(frozen=True)
class Race:
    """How all rounds ended.

    Attributes:
        rounds: what became of each: the version of either process, and which of them won.
        entries: source versions of the chain.
        void: copies that lost, with their marks.
        copies: how many versions the stage's model has.
        aliases: of the build's model and of the stage's, and what they should name.
        seconds: of all rounds.
    """

    rounds: tuple[dict[str, Any], ...]
    entries: tuple[int, ...]
    void: tuple[tuple[int, str | None], ...]
    copies: int
    aliases: tuple[int, int]
    holder: tuple[int, int]
    seconds: float

    def __str__(self) -> str:
        won = Counter(one["winner"] for one in self.rounds)
        share = ", ".join(f"process {process} won {count}" for process, count in sorted(won.items()))
        return f"{len(self.rounds)} rounds in {self.seconds:.0f} s: one winner in each ({share})"


class _Together(Progress):
    """Waits at the last safe point, where the gates have spoken and nothing is written, until both are there."""

    def __init__(self, barrier: Any, pause: float) -> None:
        self._barrier, self._pause, self._left = barrier, pause, 3

    def advance(self, count: int = 1, **fields: Any) -> None:
        self._left -= count
        if count and self._left == 0:
            self._barrier.wait(_PATIENCE)
            time.sleep(self._pause)


def race(uri: str, workspace: Path, rounds: int, *, seed: int = 0) -> Race:
    """Let two processes promote two versions in every round, both having seen the same holder.

    This process speaks to the registry only afterwards: connections do not survive a fork.
    """
    started = time.monotonic()
    meeting = Barrier(2)
    logs = [workspace / f"racer-{number}.jsonl" for number in (0, 1)]
    children = [forked(lambda n=number: _run(uri, workspace, rounds, seed, n, meeting, logs[n])) for number in (0, 1)]
    assert [exit_code(child) for child in children] == [0, 0]
    told = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
    found = [
        {"versions": [one["version"] for one in both], "winner": _only([i for i, one in enumerate(both) if one["won"]])}
        for both in zip(*told, strict=True)
    ]
    seconds = time.monotonic() - started
    with connected(uri, workspace=workspace) as registry:
        chain = read_chain(registry, "demo", "production")
        models = [registry.client.get_registered_model(name) for name in ("dspark-demo", chain.model)]
        return Race(
            rounds=tuple(found),
            entries=tuple(link.source_version for link in chain.links),
            void=tuple((copy.version, copy.void) for copy in chain.void),
            copies=sum(1 for _ in versions(registry, chain.model)),
            aliases=tuple(int(model.aliases["production"]) for model in models),
            holder=(chain.head.source_version, chain.head.version),
            seconds=seconds,
        )


def check(result: Race, rounds: int) -> None:
    """One winner in each round; history is the winners in order; every other copy is void and says to whom it lost."""
    assert len(result.rounds) == rounds
    assert list(result.entries) == [one["versions"][one["winner"]] for one in result.rounds]
    assert result.copies == 2 * rounds
    # Winner and loser of a round are neighbours, whichever process was which.
    assert list(result.void) == [(2 * n, f"lost to version {2 * n - 1}") for n in range(1, rounds + 1)]
    assert result.aliases == result.holder


def _run(uri: str, workspace: Path, rounds: int, seed: int, number: int, meeting: Any, log: Path) -> None:
    pauses = random.Random(f"{seed} {number}")
    with log.open("w") as out:
        for turn in range(rounds):
            with connected(uri, workspace=workspace) as registry:
                chain, _ = settled(registry, "demo", "production")
                held = chain.head.source_version if chain.head else None
                version = [one for one in VERSIONS if one != held][(number + turn) % 2]
                meeting.wait(_PATIENCE)
                try:
                    done = promote(
                        registry,
                        "demo",
                        "production",
                        judge=_open,
                        author=Author(f"racer {number}", "c0ffee"),
                        scratch=workspace / f"work-{number}",
                        version=version,
                        progress=_Together(meeting, pauses.choice((0, 0, 0.001, 0.01))),
                    )
                    won = done.outcome == "done"
                except GateError as error:
                    assert "somebody else was first" in error.message
                    won = False
                print(json.dumps({"version": version, "won": won}), file=out)
                meeting.wait(_PATIENCE)


def _open(package: Path, champion: str | None) -> GateReport:
    """Gates that are open: the race is what is tested."""
    manifest = read_manifest(package)
    row = GateRow(gate="package", verdict="pass", reason="for the race")
    return GateReport.of(
        [row],
        build=manifest.build,
        package_digest=manifest.digests.package_digest,
        champion=champion,
        stage="production",
    )


def _only(winners: list[int]) -> int:
    assert len(winners) == 1, f"{len(winners)} winners"
    return winners[0]


def forked(work: Any) -> int:
    """Run `work` in a process of its own; its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    return child


def exit_code(child: int) -> int:
    """How that process ended; waits for it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
