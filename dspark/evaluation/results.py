"""What evaluation writes, as typed JSON. Nothing heavy is imported: reports, gates and verification read it too.

Accepted lengths include the bonus token. A number that could not be measured is left out and its reason stands in
`absent` beside it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dspark.calibration.assessment import Assessment
from dspark.config.models import DType
from dspark.decoding.records import Label
from dspark.measured import Measured

Result = Literal["pass", "fail", "inconclusive"]
Role = Literal["training", "evaluation_only"]


class Model(BaseModel):
    """Base of everything here."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)


# ---------------------------------------------------------------- acceptance


class Acceptance(Model):
    """How far drafts get, from the sequential decoding loop; intervals by bootstrap over prompts."""

    includes_bonus: Literal[True] = True
    tau: Measured  # tokens committed per cycle
    # Position k given that the positions before it were accepted; and the product of these up to k, which is the
    # probability that a draft survives up to k. Cut before the first position that no block reached.
    conditional: tuple[Measured, ...]
    marginal: tuple[Measured, ...]
    absent: dict[str, str] = {}


class Expectation(Model):
    """tau as the confidences of blocks promise it, and as it came, over the cycles whose whole block was judged."""

    calibrated: bool  # whether the confidences had their temperatures
    tau: Measured  # mean of 1 + sum of survival
    measured: Measured
    error: Measured  # tau / measured - 1, paired by prompt


class DomainMetrics(Acceptance):
    """One domain at one temperature."""

    role: Role
    prompts: int
    stopped: int  # prompts whose text ended by itself, below the length limit
    cycles: int
    tokens: int
    acceptance_rate: Measured | None = None  # accepted / verified drafts whose outcome is known
    tokens_per_second: Measured | None = None  # of the evaluation's own batches; throughput is measured elsewhere
    expectation: Expectation | None = None  # absent without a confidence head


class MeanOfDomains(Model):
    """The unweighted mean over the domains that were trained on."""

    includes_bonus: Literal[True] = True
    domains: tuple[str, ...]
    tau: Measured


class TemperatureMetrics(Model):
    """Acceptance at one temperature of the target; drafts are sampled at the same one."""

    label: Label
    dtype: DType  # of the target and the drafter
    domains: dict[str, DomainMetrics]
    mean_of_domains: MeanOfDomains | None = None
    confidence: Assessment | None = None  # of the confidence head on the domains trained on, before and after STS
    absent: dict[str, str] = {}


# ---------------------------------------------------------------- throughput


class Percentiles(Model):
    """Of a latency."""

    p50: float
    p95: float
    p99: float


class LoadPoint(Model):
    """One way of decoding at one number of concurrent requests."""

    concurrency: int
    arm: str  # `none`, or the drafter's backend and the policy, as `torch fixed`
    policy: str
    tokens_per_second: Measured  # all requests together, prefill included
    tokens_per_second_per_user: Measured  # of one request from its first token on
    verified_tokens_per_request: float  # draft tokens verified per request and cycle
    ttft_seconds: Percentiles  # from the start to the first token
    itl_seconds: Percentiles  # between tokens; a cycle's tokens come together and share its time evenly


class CycleCost(Model):
    """Where the time of a cycle goes."""

    draft_seconds: Measured  # drafting a block and taking up the features of what was committed
    verify_seconds: Measured  # the target's pass and the acceptance rule
    tau: float  # tokens per cycle here
    latency_per_token_predicted_seconds: float  # (T_draft + T_verify) / tau, DSpark section 2.1
    latency_per_token_measured_seconds: float  # wall time after the prefill / tokens after the first


class ArmThroughput(Model):
    """One arm of an interleaved comparison."""

    load: LoadPoint
    cycle: CycleCost | None = None  # absent where the engine does not tell drafting from verifying
    against_none: Measured | None = None  # ratio of tokens per second; absent for plain decoding itself
    same_text: float | None = (
        None  # share of requests with exactly the text of plain decoding (half precision has ties)
    )


class ThroughputReport(Model):
    """Arms measured in one process, in turn (A B C C B A ...), on the same prompts; see `rounds.over_prompts`."""

    temperature: float
    dtype: DType
    threads: int
    rounds: int
    prompts: int
    max_new_tokens: int
    arms: dict[str, ArmThroughput]


class ParetoPoint(LoadPoint):
    """A load point, and whether another one beats it on both axes."""

    on_frontier: bool


class Pareto(Model):
    """`evaluate/pareto.json`: tokens per second against tokens per second and user."""

    schema_: Literal["dspark/pareto/1"] = Field(default="dspark/pareto/1", alias="schema")
    dtype: DType
    threads: int
    points: tuple[ParetoPoint, ...]


class EvaluationMetrics(Model):
    """`evaluate/metrics.json`."""

    schema_: Literal["dspark/evaluation/1"] = Field(default="dspark/evaluation/1", alias="schema")
    gamma: int
    policy: str  # under which acceptance was measured: whole blocks
    verification_rule: Literal["standard"] = "standard"
    max_new_tokens: int
    seed: int
    temperatures: dict[str, TemperatureMetrics]
    throughput: ThroughputReport | None = None
    absent: dict[str, str] = {}


# ---------------------------------------------------------------- losslessness


class Difference(Model):
    """An emitted token that is not the arg max of the plain forward pass."""

    prompt: str
    position: int  # in the generated text, from 0
    token: int
    best: int
    gap: float  # logit of the best token minus logit of the emitted one


class GreedyLossless(Model):
    """Every emitted token's logit in one plain forward pass is at least max - epsilon."""

    method: Literal["greedy_rescoring"] = "greedy_rescoring"
    result: Result
    n: int  # prompts
    tokens: int
    drafts: int  # draft tokens that were verified
    drafts_accepted: int
    dtype: str
    noise: float  # largest difference of a logit between the loop's batched passes and a plain one
    epsilon: float  # min(4 x noise, 1e-3)
    largest_gap: float
    near_ties: tuple[Difference, ...]  # within epsilon
    near_tie_prompts: int
    violations: tuple[Difference, ...]  # beyond epsilon


class EnumeratedCase(Model):
    """One setting under which the loop was enumerated."""

    policy: str
    family: str
    vocab: int
    draft_vocab: int
    gamma: int
    tokens: int  # whose joint law was compared
    paths: int  # of draws
    drafts: int  # verified on all of them
    largest_difference: float  # of a probability


class SampledLossless(Model):
    """The joint law of the first tokens equals the target's, draw by draw."""

    method: Literal["enumeration"] = "enumeration"
    result: Result
    temperature: float
    tolerance: float
    largest_difference: float
    cases: tuple[EnumeratedCase, ...]


class LosslessReport(Model):
    """`evaluate/lossless.json`."""

    schema_: Literal["dspark/lossless/1"] = Field(default="dspark/lossless/1", alias="schema")
    result: Result
    greedy: GreedyLossless
    sampled: SampledLossless

    @classmethod
    def of(cls, greedy: GreedyLossless, sampled: SampledLossless) -> LosslessReport:
        """Both checks, and the worse result of the two."""
        results = {greedy.result, sampled.result}
        worst: Result = "fail" if "fail" in results else "inconclusive" if "inconclusive" in results else "pass"
        return cls(result=worst, greedy=greedy, sampled=sampled)
