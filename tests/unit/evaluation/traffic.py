"""Made-up traffic: requests whose acceptance differs between them, as engines count it, as records, as a certificate.

A request of domain d accepts each draft with its own probability, drawn from a beta distribution around the domain's;
steps of one request are therefore alike. Intervals are worked out here from the spread over prompts, without the
bootstrap of `dspark.measured`.
"""

from __future__ import annotations

import numpy as np

from dspark.config.models import Sampling
from dspark.decoding.records import Cycles, Decoded, RecordSet
from dspark.engines.scrape import Scrape
from dspark.evaluation.drift import Window
from dspark.evaluation.entry import Agreement, CertificateEntry, HoldsUntil, LosslessSummary, Workload
from dspark.evaluation.results import Acceptance, LoadPoint, Percentiles
from dspark.measured import Measured

GAMMA = 3
RATES = {"math": 0.65, "chat": 0.45}
SPREAD = 25.0  # of the beta distribution: how alike requests of a domain are


def requests(generator, count, *, steps, rates=RATES, exponential=False):
    """Accepted drafts of each step of each request, taking turns among the domains."""
    found = []
    for number in range(count):
        rate = list(rates.values())[number % len(rates)]
        own = generator.beta(rate * SPREAD, (1 - rate) * SPREAD)
        length = max(1, round(generator.exponential(steps))) if exponential else steps
        found.append(np.minimum(generator.geometric(1 - own, length) - 1, GAMMA))
    return found


def scrape(found, engine="vllm", **changes):
    """As an engine counts that verifies whole blocks to their end."""
    accepted = np.concatenate(found)
    positions = tuple(int((accepted > place).sum()) for place in range(GAMMA))
    values = {
        "steps": len(accepted), "accepted": int(accepted.sum()), "drafted": GAMMA * len(accepted),
        "per_position": positions, "tokens": int(accepted.sum()) + len(accepted) + len(found), "ended": len(found),
    }  # fmt: skip
    return Scrape(engine, **values | changes)


def window(live):
    return Window(kind="since the server started", steps=live.steps, requests=live.requests, tokens=live.tokens)


def records(found, temperature=0.0):
    decoded = []
    for accepted in found:
        size, counts = len(accepted), accepted.astype(np.int32)
        gamma, zeros = np.full(size, GAMMA, np.int32), np.zeros(size)
        cycles = Cycles(
            drafted=np.zeros((size, GAMMA), np.int32), verified=gamma, accepted=counts, committed=counts + 1,
            known=gamma, confidence_logits=np.zeros((size, GAMMA), np.float32), draft_seconds=zeros,
            verify_seconds=zeros, rows=np.ones(size, np.int32),
        )  # fmt: skip
        decoded.append(Decoded(4, [0] * int(1 + cycles.committed.sum()), "length", temperature, "fixed", 0.0, cycles))
    names = [list(RATES)[number % len(RATES)] for number in range(len(found))]
    return RecordSet(tuple(map(str, range(len(found)))), tuple(names), tuple(decoded))


def measured(pairs):
    """A pooled ratio with its interval by linearisation, from (numerator, denominator) of each prompt."""
    above, below = np.array(pairs, float).T
    ratio = above.sum() / below.sum()
    error = 1.96 * np.sqrt(((above - ratio * below) ** 2).sum()) / below.sum()
    return Measured(value=float(ratio), n=len(pairs), ci95=(float(ratio - error), float(ratio + error)))


def acceptance(found):
    reached = [[(one >= place).sum() for place in range(GAMMA + 1)] for one in found]
    return Acceptance(
        tau=measured([(one.sum() + len(one), len(one)) for one in found]),
        conditional=tuple(measured([(row[k + 1], row[k]) for row in reached]) for k in range(GAMMA)),
        marginal=tuple(measured([(row[k + 1], row[0]) for row in reached]) for k in range(GAMMA)),
    )


def entry(found, *, engine="vllm", policy="fixed", status="measured", verified=float(GAMMA), **changes):
    """What a certificate says of such requests."""
    groups = {name: found[number :: len(RATES)] for number, name in enumerate(RATES)}
    tau, none = acceptance(found).tau, Measured(value=0.0, n=len(found), ci95=(0.0, 0.0))
    latency = Percentiles(p50=0.01, p95=0.02, p99=0.03)
    values = {
        "profile": "h100", "status": status, "reason": None if status == "measured" else "tau is far off",
        "fingerprint": {"engine": engine, "engine_version": "vLLM 0.32.0"}, "measured_at": "2026-11-29T12:00:00+00:00",
        "workload": Workload(
            domains=tuple(RATES), sampling=Sampling(temperature=0.0), thinking_mode="none", policy=policy,
            prompts=len(found), max_new_tokens=64,
        ),
        "acceptance": {name: acceptance(group) for name, group in groups.items()},
        "offline_vs_engine": Agreement(
            result="agrees", tolerance=0.02, prompts=len(found), offline_tau=tau, engine_tau=tau,
            relative_difference=none,
        ),
        "lossless": LosslessSummary(method="m", result="pass", n=len(found), drafts=100),
        "load": (
            LoadPoint(
                concurrency=1, arm=policy, policy=policy, tokens_per_second=tau, tokens_per_second_per_user=tau,
                verified_tokens_per_request=verified, ttft_seconds=latency, itl_seconds=latency,
            ),
        ),
        "holds_until": HoldsUntil(engine_version="vLLM 0.32.0", date="2027-05-28"),
    }  # fmt: skip
    return CertificateEntry(**values | changes)
