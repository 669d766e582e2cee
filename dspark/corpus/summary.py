"""`prompts/summary.json`: what became of every domain, by reason, by split and in tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dspark.config.models import SplitShares
from dspark.corpus.prompts import Prompt, Rejection
from dspark.corpus.splits import SPLITS, split_unit

REJECTED = "rejected.jsonl"
OVER_LIMIT = "per-domain"  # the category of what `prompts.per_domain` leaves out


class SplitCount(BaseModel):
    """What a split holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: int
    templates: int  # different templates among them
    units: int  # templates and first user turns: what is split as a whole
    tokens: int  # of the rendered prompts


class DomainCount(BaseModel):
    """What became of a domain: input = kept + rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    source_digest: str  # sha256 of the file
    evaluation_only: bool
    input: int  # rows that are not blank
    kept: int
    rejected: int
    blank_lines: int
    rejected_by_reason: dict[str, int]
    splits: dict[str, SplitCount]


class PromptsSummary(BaseModel):
    """The file: read with `read_model(path, PromptsSummary)`."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal["dspark/prompts/1"] = Field(default="dspark/prompts/1", alias="schema")
    corpus: str
    digest: str  # over `files`
    files: dict[str, str]  # sha256 of the files beside this one
    seed: int
    shares: SplitShares
    per_domain: int | None = None
    max_prompt_tokens: int
    input: int
    kept: int
    rejected: int
    blank_lines: int
    domains: dict[str, DomainCount]
    splits: dict[str, SplitCount]
    warnings: list[str]

    def told(self, folder: str) -> str:
        """`13 prompts kept, 20 rejected: corpora/odd/prompts/rejected.jsonl (12 json, 8 too-long)`.

        Args:
            folder: the file's own, for whoever looks up what was rejected.
        """
        reasons = Counter[str]()
        for domain in self.domains.values():
            reasons.update(domain.rejected_by_reason)
        over = reasons.pop(OVER_LIMIT, 0)  # nothing is wrong with these
        kept = f"{self.kept} prompts kept" + (f", {over} over prompts.per_domain" if over else "")
        if not reasons:
            return f"{kept}, none rejected"
        listed = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        return f"{kept}, {reasons.total()} rejected: {folder}/{REJECTED} ({listed})"


def count_domain(
    source: str,
    source_digest: str,
    evaluation_only: bool,
    blank_lines: int,
    splits: Mapping[str, Sequence[Prompt]],
    rejections: Sequence[Rejection],
    token_ids: Mapping[str, list[int]],
) -> DomainCount:
    """Count one domain.

    Args:
        source: its source, as the domain names it.
        source_digest: sha256 of the file.
        evaluation_only: whether it is never trained on.
        blank_lines: lines that are no rows.
        splits: its prompts, by split.
        rejections: its rows that were not kept.
        token_ids: the rendered prompt of each prompt id.
    """
    kept = sum(map(len, splits.values()))
    return DomainCount(
        source=source,
        source_digest=source_digest,
        evaluation_only=evaluation_only,
        input=kept + len(rejections),
        kept=kept,
        rejected=len(rejections),
        blank_lines=blank_lines,
        rejected_by_reason=count_reasons(rejections),
        splits={split: count_split(splits[split], token_ids) for split in SPLITS},
    )


def count_split(prompts: Sequence[Prompt], token_ids: Mapping[str, list[int]]) -> SplitCount:
    """Count the prompts of a split, of one domain or of all."""
    return SplitCount(
        prompts=len(prompts),
        templates=len({(prompt.domain, prompt.template) for prompt in prompts if prompt.template is not None}),
        units=len({split_unit(prompt) for prompt in prompts}),
        tokens=sum(len(token_ids[prompt.id]) for prompt in prompts),
    )


def count_reasons(rejections: Sequence[Rejection]) -> dict[str, int]:
    """Number of rejections by category, sorted by name."""
    return dict(sorted(Counter(row.category for row in rejections).items()))
