"""What a build will take, from shapes and settings alone: bytes of features, peak memory, seconds. Loads no torch.

Memory is what the code keeps at its worst moment, in bytes, part by part; allocators and libraries take more. Seconds
are a floor: the arithmetic at the rate of a layer (of a bare product, in training), or the bytes at the rate of a bare
copy, whichever lasts longer (a roofline). Real stages have small operations in between and take longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dspark.config.models import (
    CalibrationSettings,
    CorpusSettings,
    DrafterSettings,
    DType,
    FeatureDType,
    TrainingSettings,
)
from dspark.drafters.sizes import DrafterSize
from dspark.features.sizes import bytes_per_token
from dspark.targets.shape import TargetShape

FEATURE_DTYPES: tuple[FeatureDType, ...] = ("bfloat16", "float32", "int8", "fp8")
SIZES: Mapping[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_WIDE = 4  # bytes of float32
_NEWTON_SCHULZ = 5  # iterations of torch's Muon


@dataclass(frozen=True)
class SplitTokens:
    """What a split holds at most. A sequence is a prompt with its response."""

    sequences: int
    prompt_tokens: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        """All of them; of all, features are made."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class Chunks:
    """How much the stages do at a time; the numbers are theirs.

    Attributes:
        prefill_tokens: padded prompt tokens per forward pass of `targets.generation`.
        logits_bytes: float32 logits at a time of `features.forward`.
        loss_rows: slots at a time of `training.losses`.
        dev_anchors: per response of the dev split (`training.development`).
    """

    prefill_tokens: int
    logits_bytes: int
    loss_rows: int
    dev_anchors: int


@dataclass(frozen=True)
class Job:
    """What is estimated.

    Attributes:
        taps: layers of the target that feed the drafter, m.
        splits: train and dev.
        longest: tokens of the longest sequence.
        longest_prompt: tokens of the longest prompt.
        device: torch's type of the one that the target runs on.
        training_device: of the one that the drafter is trained on.
        dtype: that the target computes in on its device.
        precision: that the forward pass of training computes in.
        read_budget: bytes of features that training holds in memory.
    """

    shape: TargetShape
    drafter: DrafterSize
    taps: int
    splits: Mapping[str, SplitTokens]
    longest: int
    longest_prompt: int
    corpus: CorpusSettings
    block: DrafterSettings
    training: TrainingSettings
    calibration: CalibrationSettings
    chunks: Chunks
    device: str
    training_device: str
    dtype: DType
    precision: DType
    read_budget: int

    @property
    def tokens(self) -> int:
        """Of which features are made."""
        return sum(split.tokens for split in self.splits.values())

    @property
    def sequence_tokens(self) -> int:
        """Of an average sequence, rounded up."""
        return math.ceil(self.tokens / max(1, sum(split.sequences for split in self.splits.values())))


@dataclass(frozen=True)
class FeatureBytes:
    """What features take on disk in one dtype.

    Attributes:
        bytes_per_token: see `features.sizes`.
        cached: bytes in mode cached.
        online: bytes in mode online: none.
        hybrid: bytes in mode hybrid, where `features.cache_gib` is set: at most that much.
    """

    dtype: FeatureDType
    bytes_per_token: int
    cached: int
    online: int
    hybrid: int | None


@dataclass(frozen=True)
class Rates:
    """What this machine does, measured.

    Attributes:
        flops: per second, of a decoder layer of the target's widths in its dtype, products of weights alone counted;
            a multiplication with its addition is two.
        training_flops: of a bare product in the precision of training.
        bytes_per_second: of a copy where the target runs, read and written bytes together.
        training_bytes_per_second: of one where the drafter is trained.
    """

    flops: float
    training_flops: float
    bytes_per_second: float
    training_bytes_per_second: float


def feature_bytes(job: Job) -> tuple[FeatureBytes, ...]:
    """Bytes of the features of train and dev in every mode and dtype. Headers of shards (some kB each) come on top."""
    limit = job.corpus.features.cache_gib
    rows = []
    for dtype in FEATURE_DTYPES:
        each = bytes_per_token(job.shape.hidden_size, job.taps, dtype)
        whole = job.tokens * each
        rows.append(FeatureBytes(dtype, each, whole, 0, None if limit is None else min(whole, int(limit * 2**30))))
    return tuple(rows)


def stored_share(job: Job) -> float:
    """Share of the features that the build's mode and dtype store; the others are computed while training runs."""
    settings = job.corpus.features
    whole = job.tokens * bytes_per_token(job.shape.hidden_size, job.taps, settings.dtype)
    if settings.mode == "cached" or whole == 0:
        return 1.0
    return 0.0 if settings.cache_gib is None else min(1.0, settings.cache_gib * 2**30 / whole)


# ---------------------------------------------------------------- memory

HOST_PARTS = frozenset(["a shard", "features read ahead"])  # in the machine's memory wherever the rest is


def responses_memory(job: Job) -> dict[str, int]:
    """Peak bytes of `responses`: `targets.generation` allocates the cache of a batch at once, in all its length."""
    size, rows = SIZES[job.dtype], job.corpus.responses.batch_size
    width = min(max(job.chunks.prefill_tokens, job.longest_prompt), rows * job.longest_prompt)
    return {
        "weights": job.shape.parameters * size,
        "keys and values": rows * job.longest * job.shape.cached_values * size,
        "activations of a prefill": width * job.shape.widest_layer * size,
        "attention mask": width * job.longest_prompt * (1 + size),
        # As computed, in float32, and as weights of the draw.
        "logits": rows * job.shape.vocab_size * (size + 2 * _WIDE),
    }


def features_memory(job: Job) -> dict[str, int]:
    """Peak bytes of `features`. The shard is in the machine's memory, the rest on the device."""
    size, settings = SIZES[job.dtype], job.corpus.features
    width = job.longest if job.device == "cpu" else max(settings.batch_tokens, job.longest)
    each = bytes_per_token(job.shape.hidden_size, job.taps, settings.dtype)
    return {
        "weights": job.shape.parameters * size,
        "activations of a pass": width * job.shape.widest_layer * size,
        # Layer by layer, then joined, and the last hidden state.
        "taps": width * (2 * job.taps + 1) * job.shape.hidden_size * size,
        "logits": job.chunks.logits_bytes * (size + 2 * _WIDE) // _WIDE,
        # `write_shard` joins one name's numbers at a time: they are there twice meanwhile.
        "a shard": 2 * settings.sequences_per_shard * job.sequence_tokens * each,
    }


def training_memory(job: Job) -> dict[str, int]:
    """Peak bytes of `train`, of one process: float32 masters, as `training.trainer` and `training.optimisation` keep.

    AdamW has two float32 numbers beside each parameter, Muon one; `adamw` moves all by AdamW, `muon` the backbone's
    matrices by Muon and the rest by AdamW. Activations are what autograd keeps for the backward pass.
    """
    drafter, shape = job.drafter, job.shape
    backbone = drafter.parameters - drafter.others
    states = (backbone if job.training.optimizer == "muon" else 2 * backbone) + 2 * drafter.others
    ends = shape.head_products * SIZES[job.dtype] * (1 if shape.tie_word_embeddings else 2)
    reduced = drafter.proposed * shape.hidden_size * SIZES[job.dtype] if drafter.proposed < shape.vocab_size else 0
    in_mode_online = job.corpus.features.mode != "cached"
    return {
        "weights": drafter.parameters * _WIDE,
        "gradients": drafter.parameters * _WIDE,
        f"states of {job.training.optimizer}": states * _WIDE,
        "embedding and head of the target": ends + reduced,
        **({"the target itself": shape.parameters * SIZES[job.dtype]} if in_mode_online else {}),
        "losses": _loss_bytes(job),
        "activations": _activation_bytes(job),
        "features read ahead": job.read_budget,
    }


def _slots(job: Job) -> tuple[int, int, int]:
    """Of one step at most: sequences, blocks per sequence, context tokens per sequence."""
    context = min(job.training.max_length, job.longest)
    answered = min(job.corpus.responses.max_new_tokens, context)  # anchors stand in the response
    return job.training.sequences_per_step, min(job.training.anchors_per_sequence, answered), context


def _loss_bytes(job: Job) -> int:
    """`training.losses`: the joined head, in float32 and as multiplied, three buffers of logits, gradients of slots."""
    drafter, width = job.drafter, job.shape.hidden_size + job.drafter.rank
    sequences, blocks, _ = _slots(job)
    rows = sequences * blocks * job.block.gamma
    narrow = SIZES[job.precision]
    joined = drafter.proposed * width * (_WIDE + (2 * narrow if narrow < _WIDE else 0))
    wide_head = drafter.proposed * job.shape.hidden_size * _WIDE
    buffers = 3 * min(job.chunks.loss_rows, rows) * drafter.proposed * _WIDE
    return joined + wide_head + buffers + 2 * rows * width * _WIDE + drafter.proposed * drafter.rank * _WIDE


def _activation_bytes(job: Job) -> int:
    drafter, d, size = job.drafter, job.shape.hidden_size, SIZES[job.precision]
    sequences, blocks, context = _slots(job)
    heads, keys = drafter.heads * drafter.head_dim, 2 * drafter.kv_heads * drafter.head_dim
    # Taps as read and as multiplied; the context before and after its norm; keys and values, plain and turned.
    of_context = (2 * job.taps * d + 2 * d + drafter.layers * 2 * keys) * size
    # Two residuals in float32; norms, queries (plain, turned), keys and values, outputs, and the four of SwiGLU.
    of_layer = 2 * d * _WIDE + (3 * d + 3 * heads + 2 * keys + 4 * drafter.intermediate_size) * size
    scores = drafter.heads * (context + job.block.gamma) * size
    slots = sequences * blocks * job.block.gamma
    # Of one layer at a time the scores are there twice more: before the softmax, and as gradients.
    return sequences * context * of_context + slots * (drafter.layers * (of_layer + scores) + 2 * scores)


# ---------------------------------------------------------------- seconds


def responses_seconds(job: Job, rates: Rates) -> float:
    """Of `responses`: every prompt once, then token by token to the limit, all rows of a batch in one step.

    A step reads all weights and the cache; of prompts that end earlier the time is saved.
    """
    settings, size = job.corpus.responses, SIZES[job.dtype]
    rows = sum(split.sequences for split in job.splits.values())
    if rows == 0:
        return 0.0
    batches = math.ceil(rows / settings.batch_size)
    in_step = min(settings.batch_size, rows)
    prompts = sum(split.prompt_tokens for split in job.splits.values())
    prefill = 2 * job.shape.products_per_token * prompts / rates.flops
    seen = job.longest_prompt + settings.max_new_tokens / 2
    products = job.shape.products_per_token + job.shape.head_products + job.shape.attended_width * seen
    read = (job.shape.parameters + in_step * job.shape.cached_values * seen) * size
    step = max(2 * products * in_step / rates.flops, read / rates.bytes_per_second)
    steps = sum(split.response_tokens for split in job.splits.values()) / rows
    return prefill + batches * steps * step


def features_seconds(job: Job, rates: Rates) -> float:
    """Of `features`: one forward pass over the tokens that are stored, logits of the responses' for logsumexp."""
    answered = sum(split.response_tokens for split in job.splits.values())
    stored = stored_share(job)
    return _pass_seconds(job, rates, stored * job.tokens, stored * answered)


def training_seconds(job: Job, rates: Rates) -> float:
    """Of `train`: forward and backward passes (three times the forward one), losses, optimizer, evaluations on dev."""
    drafter, training = job.drafter, job.training
    sequences, blocks, _ = _slots(job)
    context = min(training.max_length, job.sequence_tokens)
    forward = _drafter_flops(job, sequences * context, sequences * blocks, context)
    rows = sequences * blocks * job.block.gamma
    backward_of_losses = 2 * rows * drafter.proposed * (job.shape.hidden_size + 2 * drafter.rank)
    losses = _loss_flops(job, rows)
    step = (3 * forward + losses + backward_of_losses) / rates.training_flops + _optimizer_seconds(job, rates)
    dev = job.splits.get("dev", SplitTokens(0, 0, 0))
    evaluated = dev.sequences * min(job.chunks.dev_anchors, context)
    evaluation = _drafter_flops(job, dev.tokens, evaluated, context) + _loss_flops(job, evaluated * job.block.gamma)
    evaluations = math.ceil(training.steps / training.dev_every_steps)
    seconds = training.steps * step + evaluations * evaluation / rates.training_flops
    if computed := 1 - stored_share(job):
        drawn = computed * training.steps * sequences * job.sequence_tokens
        answered = sum(split.response_tokens for split in job.splits.values()) / max(1, job.tokens)
        seconds += _pass_seconds(job, rates, drawn, drawn * answered)
    return seconds


def calibration_seconds(job: Job, rates: Rates) -> float:
    """Of `calibrate`, at worst: every draft is refused, so that each new token takes a round of gamma + 1 tokens."""
    settings, size = job.calibration, SIZES[job.dtype]
    rows = settings.prompts_per_domain * len(job.corpus.domains)
    in_step = min(settings.batch_size, rows)
    tokens = in_step * (job.block.gamma + 1)
    products = job.shape.products_per_token + job.shape.head_products
    drafting = _drafter_flops(job, in_step, in_step, job.longest) + _loss_flops(job, in_step * job.block.gamma)
    read = (job.shape.parameters + job.drafter.parameters + in_step * job.longest * job.shape.cached_values) * size
    step = max((2 * products * tokens + drafting) / rates.flops, read / rates.bytes_per_second)
    return len(settings.temperatures) * math.ceil(rows / settings.batch_size) * settings.max_new_tokens * step


def _pass_seconds(job: Job, rates: Rates, tokens: float, answered: float) -> float:
    """A forward pass of the target over sequences; a token attends to half of its sequence on average."""
    attended = job.shape.attended_width * job.sequence_tokens / 2
    products = (job.shape.products_per_token + attended) * tokens + job.shape.head_products * answered
    return 2 * products / rates.flops


def _drafter_flops(job: Job, context_tokens: float, blocks: float, context: float) -> float:
    """A forward pass of the drafter without losses."""
    drafter = job.drafter
    attended = drafter.layers * 2 * drafter.heads * drafter.head_dim * (context + job.block.gamma)
    slots = blocks * job.block.gamma
    return 2 * (drafter.context_products * context_tokens + (drafter.slot_products + attended) * slots)


def _loss_flops(job: Job, rows: float) -> float:
    """Logits of the drafter, sequential head included, and of the target."""
    return 2 * rows * job.drafter.proposed * (2 * job.shape.hidden_size + job.drafter.rank)


def _optimizer_seconds(job: Job, rates: Rates) -> float:
    """Of one step: the states are read and written; Muon makes each matrix orthogonal by Newton-Schulz iterations.

    An iteration on [a, b], a <= b, is two products with it and one of [a, a] (torch.optim.Muon).
    """
    moved = 7 * job.drafter.parameters * _WIDE / rates.training_bytes_per_second  # read 4 of AdamW's numbers, write 3
    if job.training.optimizer != "muon":
        return moved
    shapes = [(min(matrix), max(matrix)) for matrix in job.drafter.backbone]
    products = _NEWTON_SCHULZ * sum(2 * small * small * large + small**3 for small, large in shapes)
    return moved + 2 * products / rates.training_flops
