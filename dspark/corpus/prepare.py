"""Stage `prompts`: read the domains, screen, merge duplicates, split, and write what the later stages read.

Every row of every source is kept in exactly one split or stands in `rejected.jsonl` with its reason:
kept + rejected == input, checked before anything is written.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dspark.config.models import CorpusSettings, DomainSpec, PackageSource, PromptSettings
from dspark.corpus.domains import domain_file, read_domain
from dspark.corpus.prompts import Prompt, Reading, Rejection, merge_duplicates, rejection
from dspark.corpus.screening import PromptEncoder, screen
from dspark.corpus.splits import SPLITS, apportion, assign_split, likely_units, order_key, split_unit
from dspark.corpus.summary import OVER_LIMIT, REJECTED, PromptsSummary, count_domain, count_reasons, count_split
from dspark.errors import DataError, SettingsError
from dspark.io.atomic import replace_tree
from dspark.io.digest import digest_file, digest_listing
from dspark.io.jsonfile import write_model
from dspark.io.jsonlines import write_jsonlines
from dspark.io.progress import Progress


@dataclass
class _Corpus:
    """What has been found out about the prompts so far."""

    splits: dict[str, list[Prompt]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    rejections: list[Rejection] = field(default_factory=list)
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def prepare_prompts(
    settings: CorpusSettings,
    domains: Sequence[DomainSpec],
    domains_folder: Path,
    encoder: PromptEncoder,
    out: Path,
    progress: Progress | None = None,
    *,
    needed: Collection[str] = SPLITS,
) -> PromptsSummary:
    """Make `prompts/`: `{train,dev,calibration,eval}.jsonl`, `rejected.jsonl` and `summary.json`, by one rename.

    Within a split the prompts of a domain stand in hash order: the first n of them are a fair sample.

    Args:
        settings: names the domains, says which are only evaluated, and how to screen and split.
        domains: the specification of each of them, in any order.
        domains_folder: where their YAML files lie.
        encoder: the target's tokenizer and chat template.
        out: the folder to make or replace.
        progress: counts prompts screened.
        needed: splits that must not be empty; a build needs all of them.
    Raises:
        SettingsError, PreflightError: a domain that is unknown, named twice, or whose source is not there.
        DataError: an ambiguous id, no prompt of a domain in train, no usable prompt in an evaluation domain, or a
            needed split without a prompt of any domain.
    """
    progress = progress or Progress()
    specs = _order(settings, domains)
    evaluation_only = set(settings.evaluation_domains)
    readings = {spec.name: read_domain(spec, domains_folder) for spec in specs}

    corpus = _Corpus(rejections=[row for reading in readings.values() for row in reading.rejections])
    usable = _screen_all(readings, encoder, settings.prompts.max_prompt_tokens, corpus, progress)
    unique = _merge(usable, evaluation_only, corpus)
    for spec in specs:
        mine = [prompt for prompt in unique if prompt.domain == spec.name]
        divided, left_out = divide(mine, settings.prompts, spec.name in evaluation_only)
        corpus.rejections += left_out
        for split, prompts in divided.items():
            corpus.splits[split] += prompts

    total = sum(len(reading.prompts) + len(reading.rejections) for reading in readings.values())
    if sum(map(len, corpus.splits.values())) + len(corpus.rejections) != total:
        raise DataError("kept + rejected prompts are not the input", "this is a fault of dspark: please report it")
    corpus.warnings = _check_splits(settings, corpus)
    _require_splits(settings, specs, corpus, needed)
    for warning in corpus.warnings:
        progress.note(warning)

    work = out.parent / f".{out.name}.part"
    shutil.rmtree(work, ignore_errors=True)  # what a kill left behind
    try:
        summary = _write(work / out.name, settings, specs, domains_folder, readings, corpus)
        replace_tree(work / out.name, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return summary


def divide(
    prompts: Sequence[Prompt], settings: PromptSettings, evaluation_only: bool
) -> tuple[dict[str, list[Prompt]], list[Rejection]]:
    """Divide the prompts of one domain among the splits, and cut them down to `per_domain`.

    What is over `per_domain` is rejected with that reason, from each split in proportion, so that shares stay.
    """
    groups: dict[str, list[Prompt]] = {split: [] for split in SPLITS}
    for prompt in prompts:
        split = "eval" if evaluation_only else assign_split(prompt, settings.shares, settings.seed)
        groups[split].append(prompt)
    for group in groups.values():
        group.sort(key=lambda prompt: order_key(prompt, settings.seed))
    if settings.per_domain is None:
        return groups, []
    quotas = dict(zip(SPLITS, apportion(settings.per_domain, [len(groups[split]) for split in SPLITS]), strict=True))
    reason = f"over prompts.per_domain, which is {settings.per_domain}"
    over = [prompt for split in SPLITS for prompt in groups[split][quotas[split] :]]
    kept = {split: groups[split][: quotas[split]] for split in SPLITS}
    return kept, [rejection(prompt, OVER_LIMIT, reason) for prompt in over]


def _order(settings: CorpusSettings, domains: Sequence[DomainSpec]) -> list[DomainSpec]:
    """The specifications in the order of the settings, training domains first."""
    names = [*settings.domains, *settings.evaluation_domains]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise SettingsError(
            f"corpus {settings.name!r}: domain {', '.join(twice)} is named twice",
            "a domain stands either in domains or in evaluation_domains, once",
        )
    known = {spec.name: spec for spec in domains}
    missing = [name for name in names if name not in known]
    if missing:
        raise SettingsError(f"corpus {settings.name!r}: domain {', '.join(missing)} does not exist")
    return [known[name] for name in names]


def _screen_all(
    readings: Mapping[str, Reading], encoder: PromptEncoder, max_tokens: int, corpus: _Corpus, progress: Progress
) -> dict[str, list[Prompt]]:
    """The prompts that the target can be asked, by domain; before duplicates are merged, so that an unusable
    first spelling does not take a usable second one with it."""
    usable: dict[str, list[Prompt]] = {name: [] for name in readings}
    progress.start("screen prompts", total=sum(len(reading.prompts) for reading in readings.values()), unit="prompts")
    for name, reading in readings.items():
        for prompt in reading.prompts:
            result = screen(prompt, encoder, max_tokens)
            if isinstance(result, Rejection):
                corpus.rejections.append(result)
            else:
                usable[name].append(prompt)
                # An id stands twice only for duplicates, of which the first is kept.
                corpus.token_ids.setdefault(prompt.id, result)
            progress.advance()
    return usable


def _merge(usable: Mapping[str, Sequence[Prompt]], evaluation_only: set[str], corpus: _Corpus) -> list[Prompt]:
    """Merge duplicates over all domains and keep every first user turn within one unit of splitting.

    Evaluation domains come first: what they ask is not trained on, in whatever domain it also stands.
    """
    seen: dict[str, Prompt] = {}
    roots: dict[str, tuple[Prompt, str]] = {}
    kept: list[Prompt] = []
    for name in sorted(usable, key=lambda name: name not in evaluation_only):
        unique, duplicates = merge_duplicates(usable[name], seen)
        corpus.rejections += duplicates
        for prompt in unique:
            unit = "evaluation" if name in evaluation_only else split_unit(prompt)
            first, expected = roots.setdefault(prompt.root.casefold(), (prompt, unit))
            if unit == expected:
                kept.append(prompt)
            elif expected == "evaluation":
                reason = f"begins as {first.id}, which is only evaluated"
                corpus.rejections.append(rejection(prompt, "evaluation-only", reason))
            else:
                reason = f"template: begins as {first.id} ({first.source}:{first.line}), which is split apart from it"
                corpus.rejections.append(rejection(prompt, "template", reason))
    return kept


def _check_splits(settings: CorpusSettings, corpus: _Corpus) -> list[str]:
    """Warnings about splits without prompts of a domain; an error where nothing could be trained or evaluated."""
    counts = {split: Counter(prompt.domain for prompt in prompts) for split, prompts in corpus.splits.items()}

    def refuse(name: str, what: str, hint: str) -> DataError:
        reasons = count_reasons([row for row in corpus.rejections if row.domain == name])
        listed = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"
        return DataError(f"domain {name!r}: {what} (rejected: {listed})", hint)

    for name in settings.evaluation_domains:
        if not counts["eval"][name]:
            raise refuse(name, "no usable prompt to evaluate", "correct its source, or leave it out of the corpus")
    warnings = []
    for name in settings.domains:
        empty = [split for split in SPLITS if not counts[split][name]]
        if "train" in empty:
            usable = sum(counts[split][name] for split in SPLITS)
            raise refuse(
                name,
                f"none of its {usable} usable prompts falls into train",
                "add prompts (or templates: one is never divided), or raise prompts.shares.train",
            )
        warnings += [f"domain {name!r} has no prompt in {split}: add prompts or templates" for split in empty]
    return warnings


def _require_splits(
    settings: CorpusSettings, specs: Sequence[DomainSpec], corpus: _Corpus, needed: Collection[str]
) -> None:
    """Refuse a corpus of which a split is empty: training, calibration or evaluation would, after the dear stages."""
    empty = [split for split in SPLITS if split in needed and not corpus.splits[split]]
    if not empty:
        return
    shares = settings.prompts.shares.model_dump()
    kept = [prompt for split in SPLITS for prompt in corpus.splits[split] if prompt.domain in settings.domains]
    rows = [
        f"{_source(spec)}: {sum(prompt.domain == spec.name for prompt in kept)} kept, "
        f"{sum(row.domain == spec.name for row in corpus.rejections)} rejected"
        for spec in specs
        if spec.name in settings.domains
    ]
    enough = likely_units([shares[split] for split in empty])
    cut = (
        "" if settings.prompts.per_domain is None else f", or raise prompts.per_domain ({settings.prompts.per_domain})"
    )
    raise DataError(
        f"corpus {settings.name!r}: no prompt in {', '.join(empty)} over all domains ({'; '.join(rows)})",
        f"add prompts: about {enough} that begin differently (a template counts once) give every split one, 99 times "
        f"in 100; there are {len(set(map(split_unit, kept)))}{cut}",
    )


def _write(
    folder: Path,
    settings: CorpusSettings,
    specs: Sequence[DomainSpec],
    domains_folder: Path,
    readings: Mapping[str, Reading],
    corpus: _Corpus,
) -> PromptsSummary:
    for split, prompts in corpus.splits.items():
        write_jsonlines(folder / f"{split}.jsonl", (_row(prompt, corpus.token_ids[prompt.id]) for prompt in prompts))
    place = {spec.name: index for index, spec in enumerate(specs)}
    rejections = sorted(corpus.rejections, key=lambda row: (place[row.domain], row.line, row.id or ""))
    write_jsonlines(folder / REJECTED, (_present(asdict(row)) for row in rejections))

    domains = {
        spec.name: count_domain(
            source=_source(spec),
            source_digest=digest_file(domain_file(spec, domains_folder)),
            evaluation_only=spec.name in settings.evaluation_domains,
            blank_lines=readings[spec.name].blank_lines,
            splits={
                split: [prompt for prompt in prompts if prompt.domain == spec.name]
                for split, prompts in corpus.splits.items()
            },
            rejections=[row for row in rejections if row.domain == spec.name],
            token_ids=corpus.token_ids,
        )
        for spec in specs
    }
    files = {name: digest_file(folder / name) for name in [*(f"{split}.jsonl" for split in SPLITS), REJECTED]}
    summary = PromptsSummary(
        corpus=settings.name,
        digest=digest_listing(files),
        files=files,
        seed=settings.prompts.seed,
        shares=settings.prompts.shares,
        per_domain=settings.prompts.per_domain,
        max_prompt_tokens=settings.prompts.max_prompt_tokens,
        input=sum(count.input for count in domains.values()),
        kept=sum(count.kept for count in domains.values()),
        rejected=len(rejections),
        blank_lines=sum(count.blank_lines for count in domains.values()),
        domains=domains,
        splits={split: count_split(prompts, corpus.token_ids) for split, prompts in corpus.splits.items()},
        warnings=corpus.warnings,
    )
    write_model(folder / "summary.json", summary)
    return summary


def _source(spec: DomainSpec) -> str:
    source = spec.source
    return f"{source.package}:{source.file}" if isinstance(source, PackageSource) else source.path


def _row(prompt: Prompt, token_ids: list[int]) -> dict[str, Any]:
    return _present(
        {
            "id": prompt.id,
            "domain": prompt.domain,
            "template": prompt.template,
            "messages": [message.as_dict() for message in prompt.messages],
            "token_ids": token_ids,
        }
    )


def _present(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}
