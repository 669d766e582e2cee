"""Stage `responses`: the target answers the prompts of the train and dev splits.

Batches are planned once, from the prompts alone: per domain, sorted by length, in even parts. A batch is the unit of
resume. It is drawn from a generator seeded by its own digest and stored by one rename, so a killed run continues to
the same tokens, and a domain more leaves the answers to the others as they are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark.config.models import Digest, ResponseSettings, Sampling
from dspark.corpus.sequences import ResponseRow
from dspark.errors import DataError
from dspark.io.atomic import replace_tree
from dspark.io.digest import digest_file, digest_json
from dspark.io.jsonfile import read_model, validation_text, write_model
from dspark.io.jsonlines import read_jsonlines, write_jsonlines
from dspark.io.progress import Progress

if TYPE_CHECKING:
    from dspark.targets.loading import Target

# Raised whenever the same inputs would give other tokens: it is part of every key.
REVISION = 1


class PromptLike(Protocol):
    """What is needed of a prepared prompt (`corpus.prepare`)."""

    @property
    def id(self) -> str:
        """Unique in the corpus."""

    @property
    def domain(self) -> str:
        """Name of its domain."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The rendered prompt."""


class SplitCounts(BaseModel):
    """What the target said in one split."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    responses: int
    stopped: int  # ended by the target itself; the others reached the limit
    prompt_tokens: int
    response_tokens: int


class ResponsesSummary(BaseModel):
    """`responses/summary.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal["dspark/responses/1"] = Field(default="dspark/responses/1", alias="schema")
    target_digest: str
    sampling: Sampling
    max_new_tokens: int
    revision: int = REVISION
    splits: dict[str, dict[str, SplitCounts]]  # split -> domain


class BatchEntry(BaseModel):
    """What a stored batch is known by again, beside it as `<batch digest>.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal["dspark/response-batch/1"] = Field(default="dspark/response-batch/1", alias="schema")
    sha256: Digest


@dataclass(frozen=True)
class _Batch:
    rows: list[tuple[PromptLike, int]]  # prompt, sample
    digest: str


def answer_prompts(
    target: Target,
    prompts: Mapping[str, Sequence[PromptLike]],
    settings: ResponseSettings,
    store: Path,
    out: Path,
    progress: Progress | None = None,
) -> ResponsesSummary:
    """Make `responses/`: `<split>.jsonl` per split and `summary.json`, by one rename.

    Args:
        prompts: per split; prompts of `train` are answered `samples_per_prompt` times, those of others once.
        store: where finished batches are kept.
        out: the folder to make or replace.
    """
    rows = {
        split: generate_responses(
            target,
            chosen,
            settings,
            store,
            progress,
            samples=settings.samples_per_prompt if split == "train" else 1,
            task=f"{split} responses",
        )
        for split, chosen in prompts.items()
    }
    summary = ResponsesSummary(
        target_digest=target.record.digest,
        sampling=_sampling(target, settings),
        max_new_tokens=settings.max_new_tokens,
        splits={split: _count(responses) for split, responses in rows.items()},
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".responses-") as name:
        folder = Path(name) / "responses"
        folder.mkdir()
        for split, responses in rows.items():
            write_jsonlines(folder / f"{split}.jsonl", (row.model_dump() for row in responses))
        write_model(folder / "summary.json", summary)
        replace_tree(folder, out)
    return summary


def generate_responses(
    target: Target,
    prompts: Sequence[PromptLike],
    settings: ResponseSettings,
    store: Path,
    progress: Progress | None = None,
    *,
    samples: int = 1,
    task: str = "responses",
) -> list[ResponseRow]:
    """The target's answers to `prompts`, in their order, samples of a prompt one after the other.

    Args:
        store: finished batches are read from here and kept here, `<key>/<batch digest>.jsonl`; one that is damaged is
            answered again.
        samples: answers to each prompt.
    Raises:
        DataError: a prompt too long for the target, or logits that are not finite (names the prompt).
        Interrupted: finished batches are kept.
    """
    from dspark.targets.generation import generate

    progress = progress or Progress()
    sampling = _sampling(target, settings)
    key = store_key(target.record.digest, str(target.dtype), sampling)
    batches = plan_batches(prompts, samples, settings, sampling)
    paths = [store / key / f"{batch.digest}.jsonl" for batch in batches]
    known = [_stored(path, batch, progress) for batch, path in zip(batches, paths, strict=True)]
    stored = sum(map(len, known))
    # Batches last minutes: their responses end together, their tokens come one by one.
    rows, budget = sum(len(batch.rows) for batch in batches), settings.max_new_tokens
    progress.start(task, rows * budget, done=stored * budget, unit="tokens")
    answers: dict[tuple[str, int], ResponseRow] = {}
    for batch, path, found in zip(batches, paths, known, strict=True):
        answers |= found
        if found:
            continue
        said = generate(
            target,
            [prompt.token_ids for prompt, _ in batch.rows],
            max_new_tokens=settings.max_new_tokens,
            sampling=sampling,
            seed=int(batch.digest[:15], 16),
            on_step=progress.advance,
            names=[prompt.id for prompt, _ in batch.rows],
        )
        for damaged in (path, path.with_suffix(".json")):  # in this order: without its entry a batch would be believed
            damaged.unlink(missing_ok=True)
        write_jsonlines(
            path,
            [
                {
                    "id": prompt.id,
                    "sample": sample,
                    "domain": prompt.domain,
                    "prompt_ids": list(prompt.token_ids),
                    "response_ids": continuation.token_ids,
                    "finish_reason": continuation.finish_reason,
                }
                for (prompt, sample), continuation in zip(batch.rows, said, strict=True)
            ],
        )
        answers |= _read_batch(path, batch)
        write_model(path.with_suffix(".json"), BatchEntry(sha256=digest_file(path)))
    return [answers[prompt.id, sample] for prompt in prompts for sample in range(samples)]


def store_key(target_digest: str, dtype: str, sampling: Sampling) -> str:
    """The folder of the store in which the batches of a target lie.

    Args:
        dtype: in which it answered, as torch spells it.
    """
    return digest_json([target_digest, dtype, sampling.model_dump(mode="json"), REVISION])


def plan_batches(
    prompts: Sequence[PromptLike], samples: int, settings: ResponseSettings, sampling: Sampling
) -> list[_Batch]:
    """Which prompts are answered together: those of one domain, of similar length, in parts of equal size."""
    domains: dict[str, list[tuple[PromptLike, int]]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).extend((prompt, sample) for sample in range(samples))
    batches = []
    for _, rows in sorted(domains.items()):
        rows.sort(key=lambda row: (len(row[0].token_ids), row[0].id, row[1]))
        parts = -(-len(rows) // settings.batch_size)
        for part in range(parts):
            chosen = rows[len(rows) * part // parts : len(rows) * (part + 1) // parts]
            digest = digest_json(
                [
                    [[prompt.domain, prompt.id, sample, list(prompt.token_ids)] for prompt, sample in chosen],
                    sampling.model_dump(mode="json"),
                    settings.max_new_tokens,
                    settings.seed,
                ]
            )
            batches.append(_Batch(chosen, digest))
    return batches


def _stored(path: Path, batch: _Batch, progress: Progress) -> dict[tuple[str, int], ResponseRow]:
    """The answers of a batch that lies in the store as it was written; none if it has to be answered (again).

    A batch without its entry is whole all the same, since it is written by one rename: a kill came in between, or a
    version of dspark wrote it that knew no entries.
    """
    entry = path.with_suffix(".json")
    if not path.is_file():
        return {}
    try:
        if entry.is_file() and read_model(entry, BatchEntry).sha256 != digest_file(path):
            raise DataError(f"{path}: its sha256 is not the one in {entry.name}")
        return _read_batch(path, batch)
    except DataError as error:
        progress.note(f"{error.message}; its prompts are answered again")
        return {}


def _read_batch(path: Path, batch: _Batch) -> dict[tuple[str, int], ResponseRow]:
    try:
        rows = [ResponseRow.model_validate(value) for value in read_jsonlines(path)]
    except ValidationError as error:
        raise DataError(f"{path}: not a batch of responses: {validation_text(error)}") from None
    found = {(row.id, row.sample): row for row in rows}
    expected = {(prompt.id, sample): list(prompt.token_ids) for prompt, sample in batch.rows}
    if {name: row.prompt_ids for name, row in found.items()} != expected or len(rows) != len(expected):
        raise DataError(f"{path}: holds other prompts than its batch")
    return found


def _sampling(target: Target, settings: ResponseSettings) -> Sampling:
    return settings.sampling or target.record.sampling


def _count(rows: Sequence[ResponseRow]) -> dict[str, SplitCounts]:
    domains: dict[str, list[ResponseRow]] = {}
    for row in rows:
        domains.setdefault(row.domain, []).append(row)
    return {
        domain: SplitCounts(
            responses=len(chosen),
            stopped=sum(row.finish_reason == "stop" for row in chosen),
            prompt_tokens=sum(len(row.prompt_ids) for row in chosen),
            response_tokens=sum(len(row.response_ids) for row in chosen),
        )
        for domain, chosen in sorted(domains.items())
    }
