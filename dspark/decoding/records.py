"""What decoding decided, cycle by cycle: the raw material of acceptance, calibration and threshold sweeps.

numpy only: records are read where no torch is installed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dspark.errors import DataError
from dspark.io.atomic import atomic_path

SCHEMA = "dspark/records/1"
Label = Literal["greedy_match", "sampled"]  # different quantities, never mixed (package.md)
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Cycles:
    """The draft-verify cycles of one request, C of them.

    Attributes:
        drafted: drafted token ids, int32 [C, gamma].
        verified: draft tokens that the target looked at, [C].
        accepted: leading draft tokens that were accepted, up to and including an end of sequence, [C].
        committed: tokens that the cycle yields: accepted + 1, or `accepted` where it ends in an end of sequence, [C].
            A length limit doesn't lower it: the limit says nothing about the drafter.
        known: the outcome of positions below it counts, [C]. Those beyond were not verified, or stand behind the length
            limit or a drafted end of sequence: censored, not rejected. That goes for a rejected end too: counted only
            where the end was rejected, all behind it would be rejections.
        confidence_logits: raw, float32 [C, gamma]; NaN without a confidence head.
        draft_seconds, verify_seconds: wall time of the batch's cycle, [C]; drafting includes extending the drafter's
            context, verifying includes the acceptance rule.
        rows: requests that shared the cycle, [C].
    """

    drafted: NDArray[np.int32]
    verified: NDArray[np.int32]
    accepted: NDArray[np.int32]
    committed: NDArray[np.int32]
    known: NDArray[np.int32]
    confidence_logits: NDArray[np.float32]
    draft_seconds: NDArray[np.float64]
    verify_seconds: NDArray[np.float64]
    rows: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.verified)

    @property
    def gamma(self) -> int:
        """Draft tokens per block; 0 for plain decoding."""
        return int(self.drafted.shape[1])

    @property
    def confident(self) -> bool:
        """Whether a confidence head stood beside the drafts; True where nothing was drafted."""
        return not bool(np.isnan(self.confidence_logits).any())

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Positions whose outcome is known, [C, gamma]."""
        return np.arange(self.gamma) < self.known[:, None]

    @property
    def survived(self) -> NDArray[np.bool_]:
        """Positions whose whole prefix was accepted, [C, gamma]."""
        return np.arange(self.gamma) < self.accepted[:, None]

    @classmethod
    def concatenate(cls, parts: Sequence[Cycles]) -> Cycles:
        """The cycles of several requests, one after the other; all of one gamma."""
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS})


_ARRAYS = tuple(field.name for field in fields(Cycles))


@dataclass(frozen=True)
class Decoded:
    """One decoded request.

    Attributes:
        prompt_length: tokens of the prompt.
        token_ids: what was generated, the end of sequence included; the first token comes from the prefill.
        finish_reason: `stop` at an end of sequence, `length` at the limit.
        temperature: of the target and of the drafts.
        policy: name of the policy.
        prefill_seconds: wall time of the prefill that it shared, up to the first token.
        cycles: its cycles, in order.
        top_k, top_p: of the target and of the drafts; 0 and 1 set no limit.
    """

    prompt_length: int
    token_ids: list[int]
    finish_reason: FinishReason
    temperature: float
    policy: str
    prefill_seconds: float
    cycles: Cycles
    top_k: int = 0
    top_p: float = 1.0

    @property
    def cycle_seconds(self) -> NDArray[np.float64]:
        """Wall time of each cycle, [C]."""
        return self.cycles.draft_seconds + self.cycles.verify_seconds

    @property
    def emitted(self) -> NDArray[np.int32]:
        """Tokens that each cycle added to the output, [C]: `committed`, cut at the length limit."""
        emitted = self.cycles.committed.copy()
        if len(emitted):
            emitted[-1] -= 1 + emitted.sum() - len(self.token_ids)
        return emitted


@dataclass(frozen=True)
class RecordSet:
    """Decoded prompts of one temperature, with what they were: a file of `records/`.

    Attributes:
        ids, domains: of each prompt.
        decoded: of each prompt, in the same order.
    """

    ids: tuple[str, ...]
    domains: tuple[str, ...]
    decoded: tuple[Decoded, ...]

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.domains) == len(self.decoded):
            raise DataError("records need one id and one domain per decoded prompt")
        if len({kind_of(one) for one in self.decoded}) > 1:
            raise DataError("records of one set must share sampling, policy and gamma")

    @property
    def temperature(self) -> float:
        """Of the target and of the drafts."""
        return self.decoded[0].temperature if self.decoded else 0.0

    @property
    def label(self) -> Label:
        """What `accepted` means here."""
        return label_of(self.temperature)

    @property
    def kind(self) -> str:
        """What may be compared: temperature, policy and gamma."""
        return kind_of(self.decoded[0]) if self.decoded else "nothing"

    def of_domain(self, domain: str) -> RecordSet:
        """The prompts of one domain."""
        return self.only([index for index, name in enumerate(self.domains) if name == domain])

    def only(self, indices: Sequence[int]) -> RecordSet:
        """The prompts at `indices`, in that order."""
        return RecordSet(
            tuple(self.ids[index] for index in indices),
            tuple(self.domains[index] for index in indices),
            tuple(self.decoded[index] for index in indices),
        )


@dataclass(frozen=True)
class CalibrationArrays:
    """What calibration fits on (its `Records` takes these fields).

    Attributes:
        logits: raw confidence logits, float32 [n, gamma].
        accepted: whether the prefix up to each position was accepted, [n, gamma].
        valid: False where that does not count: unverified, past a drafted end of sequence, past a length limit,
            [n, gamma].
        conversation: which prompt a row comes from, int64 [n].
        temperature, label, top_k, top_p: of all rows.
    """

    logits: NDArray[np.float32]
    accepted: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    conversation: NDArray[np.int64]
    temperature: float
    label: Label
    top_k: int = 0
    top_p: float = 1.0


def kind_of(one: Decoded) -> str:
    """Sampling, policy and gamma of a request, in words."""
    cut = "" if (one.top_k, one.top_p) == (0, 1) else f"top_k {one.top_k}, top_p {one.top_p:g}, "
    return f"temperature {one.temperature:g}, {cut}policy {one.policy}, gamma {one.cycles.gamma}"


def label_of(temperature: float) -> Label:
    """What acceptance means at a temperature: an arg max that matched, or a draw that was accepted."""
    return "greedy_match" if temperature == 0 else "sampled"


def calibration_records(decoded: Sequence[Decoded], conversations: Sequence[int] | None = None) -> CalibrationArrays:
    """The confidence logits of all cycles with what became of each prefix.

    Args:
        decoded: of one temperature and one gamma, with whole blocks verified (policy `fixed`): under another policy
            the positions that were not verified stay unknown, and which ones these are depends on the confidences.
        conversations: an id per request; None: each request is its own.
    Raises:
        DataError: nothing decoded, no draft, no confidence head, or samplings mixed.
    """
    if len({(one.temperature, one.top_k, one.top_p) for one in decoded}) != 1:
        raise DataError("calibration records must come from one temperature: greedy matches and samples differ")
    cycles = Cycles.concatenate([one.cycles for one in decoded])
    if cycles.gamma == 0 or len(cycles) == 0:
        raise DataError("the decoded requests hold no draft to calibrate on")
    if not cycles.confident:
        raise DataError("the drafter has no confidence head: there are no confidences to calibrate")
    names = range(len(decoded)) if conversations is None else conversations
    return CalibrationArrays(
        logits=cycles.confidence_logits,
        accepted=cycles.survived,
        valid=cycles.valid,
        conversation=np.repeat(np.asarray(names, np.int64), [len(one.cycles) for one in decoded]),
        temperature=decoded[0].temperature,
        label=label_of(decoded[0].temperature),
        top_k=decoded[0].top_k,
        top_p=decoded[0].top_p,
    )


def write_records(path: Path, records: RecordSet) -> None:
    """Write a record set as one safetensors file."""
    from safetensors.numpy import save_file

    decoded = records.decoded
    cycles = Cycles.concatenate([one.cycles for one in decoded])
    tensors = {name: np.ascontiguousarray(getattr(cycles, name)) for name in _ARRAYS}
    tensors |= {
        "cycle_counts": np.array([len(one.cycles) for one in decoded], np.int64),
        "token_counts": np.array([len(one.token_ids) for one in decoded], np.int64),
        "token_ids": np.array([token for one in decoded for token in one.token_ids], np.int32),
        "prompt_lengths": np.array([one.prompt_length for one in decoded], np.int64),
        "prefill_seconds": np.array([one.prefill_seconds for one in decoded], np.float64),
    }
    about = {
        "ids": records.ids,
        "domains": records.domains,
        "finish_reasons": [one.finish_reason for one in decoded],
        "temperature": records.temperature,
        "policy": decoded[0].policy,
    }
    if (decoded[0].top_k, decoded[0].top_p) != (0, 1):
        about |= {"top_k": decoded[0].top_k, "top_p": decoded[0].top_p}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"schema": SCHEMA, "about": json.dumps(about, sort_keys=True)})


def read_records(path: Path) -> RecordSet:
    """Read what `write_records` wrote.

    Raises:
        DataError: missing, damaged, or another schema.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if (schema := metadata.get("schema")) != SCHEMA:
                raise DataError(f"{path}: schema is {schema!r}, this version of dspark reads {SCHEMA!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as reason:
        raise DataError(f"{path}: not a record file: {reason}", "make it again with `dspark run`") from None
    about = json.loads(metadata["about"])
    cycle_ends = np.cumsum(tensors["cycle_counts"])[:-1]
    split = {name: np.split(tensors[name], cycle_ends) for name in _ARRAYS}
    tokens = np.split(tensors["token_ids"], np.cumsum(tensors["token_counts"])[:-1])
    decoded = tuple(
        Decoded(
            prompt_length=int(tensors["prompt_lengths"][index]),
            token_ids=tokens[index].tolist(),
            finish_reason=_finish_reason(path, reason),
            temperature=about["temperature"],
            policy=about["policy"],
            prefill_seconds=float(tensors["prefill_seconds"][index]),
            cycles=Cycles(**{name: split[name][index] for name in _ARRAYS}),
            top_k=about.get("top_k", 0),
            top_p=about.get("top_p", 1.0),
        )
        for index, reason in enumerate(about["finish_reasons"])
    )
    return RecordSet(tuple(about["ids"]), tuple(about["domains"]), decoded)


def _finish_reason(path: Path, text: str) -> FinishReason:
    if text not in get_args(FinishReason):
        raise DataError(f"{path}: {text!r} is no finish reason")
    return "stop" if text == "stop" else "length"
