"""A package that was certified in vLLM, and a vLLM that answers its prompts as it is told."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))  # protocol_servers.py

import fake_build
import numpy as np
from protocol_servers import Reply, VLLMDouble

from dspark.decoding.records import Cycles, Decoded, RecordSet, write_records
from dspark.evaluation.entry import CertificateEntry, HoldsUntil
from dspark.evaluation.results import Percentiles
from dspark.io.jsonfile import write_model
from dspark.package.assemble import assemble
from dspark.package.sources import Sources

FACTS = {"engine": "vllm", "engine_version": "vLLM 0.32.0", "context": 500}
STEPS = 15  # of each reply; one token comes before them


def entry(**changes: Any) -> CertificateEntry:
    """In vLLM, greedy, whole blocks; tau is that of the records."""
    made = fake_build.measured_entry()
    # So slow that a busy machine's server of tests is healthy: 0.1 s a token, 2 s to the first one.
    slow = {
        "tokens_per_second_per_user": fake_build.number(10.0, 10),
        "ttft_seconds": Percentiles(p50=0.5, p95=2.0, p99=3.0),
    }
    values = {
        "fingerprint": FACTS,
        "load": tuple(point.model_copy(update=slow) for point in made.load),
        "holds_until": HoldsUntil(engine_version="vLLM 0.32.0", date="2099-01-01"),
        "workload": made.workload.model_copy(
            update={"sampling": made.workload.sampling.model_copy(update={"temperature": 0.0})}
        ),
        "offline_vs_engine": made.offline_vs_engine.model_copy(update={"engine_tau": fake_build.number(2.03, 24)}),
    }
    return made.model_copy(update=values | changes)


def make(root: Path, *, recorded: bool = True, **changes: Any) -> Path:
    """The package; its records say of every prompt what `accepted` says."""
    sources: Sources = fake_build.make(root)
    write_model(root / "certify" / f"{fake_build.CPU}.json", entry(**changes))
    if recorded:
        write_records(root / "evaluate" / "records" / "temperature-0.safetensors", records())
    assemble(sources, root / "package", card=fake_build.card)
    return root / "package"


def accepted(number: int) -> list[int]:
    """Of prompt `number` of a domain, about as certified: 9 steps of 15 accept a draft, 4 or 5 a second, 2 a third."""
    counts = [3, 3, 2, 2, 1 + number % 2, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    return counts[number:] + counts[:number]


def records() -> RecordSet:
    decoded, names = [], []
    for domain in ("math", "chat", "code"):
        for number in range(9):
            counts = np.array(accepted(number), np.int32)
            gamma, zeros = np.full(STEPS, fake_build.GAMMA, np.int32), np.zeros(STEPS)
            cycles = Cycles(
                drafted=np.zeros((STEPS, fake_build.GAMMA), np.int32), verified=gamma, accepted=counts,
                committed=counts + 1, known=gamma, draft_seconds=zeros, verify_seconds=zeros,
                confidence_logits=np.zeros((STEPS, fake_build.GAMMA), np.float32), rows=np.ones(STEPS, np.int32),
            )  # fmt: skip
            tokens = [0] * int(1 + cycles.committed.sum())
            decoded.append(Decoded(2, tokens, "length", 0.0, "fixed", 0.0, cycles))
            names.append((f"{domain}/{number}", domain))
    return RecordSet(tuple(name for name, _ in names), tuple(domain for _, domain in names), tuple(decoded))


@dataclass
class Canned:
    """Accepts of a prompt what its records say, less `missing` in every step; or does not speculate."""

    missing: int = 0
    off: bool = False
    verified: int | None = None
    gamma: int = fake_build.GAMMA
    requests: list[dict[str, Any]] = field(default_factory=list)

    def run(self, prompt: list[int], limit: int, *, endless: bool = False) -> Reply:
        counts = [max(0, count - self.missing) for count in accepted(prompt[1] - 2)]
        if self.off:
            return Reply([7] * limit, False, [])
        return Reply([7] * (1 + sum(counts) + len(counts)), False, counts)

    def histogram(self, counts: list[int]) -> list[int]:
        return [sum(one == count for one in counts) for count in range(self.gamma + 1)]


class Server(VLLMDouble):
    """With counters of requests and tokens, and other facts if told."""

    def __init__(self, engine: Canned, **model: Any) -> None:
        super().__init__(engine)
        self.model |= {"root": "/models/org/tiny-llama"} | model

    def metrics(self) -> str:
        ended = len(self.seen) // STEPS
        tokens = sum(self.seen) + len(self.seen) + ended
        return (
            super().metrics().replace('finished_reason="stop"} 3.0', f'finished_reason="stop"}} {ended}')
            + f"vllm:generation_tokens_total {tokens}\n"
        )
