"""How many prompts a corpus will hold and how long they can be, before there is a tokenizer to count with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.config.models import CorpusSettings, DomainSpec
from dspark.corpus.domains import read_domain
from dspark.corpus.prepare import divide
from dspark.corpus.splits import SPLITS

# Allowed per prompt for the chat template: a default system prompt and the marks of turns.
TEMPLATE_TOKENS = 64


@dataclass(frozen=True)
class ExpectedPrompts:
    """What a split holds at most.

    Attributes:
        tokens: of all rendered prompts.
        longest: tokens of the longest one.
    """

    prompts: int
    tokens: int
    longest: int


def expected_prompts(
    settings: CorpusSettings, domains: Sequence[DomainSpec], folder: Path
) -> dict[str, ExpectedPrompts]:
    """Upper bounds per split: no prompt is rejected, none is a duplicate, and every byte of text is a token.

    Splits are drawn as the stage `prompts` draws them, from names and texts alone.

    Args:
        domains: those of the settings, the evaluated ones included.
        folder: where their YAML files lie.
    Raises:
        SettingsError, PreflightError, DataError: as `domains.read_domain`.
    """
    lengths: dict[str, list[int]] = {split: [] for split in SPLITS}
    for spec in domains:
        divided, _ = divide(
            read_domain(spec, folder).prompts, settings.prompts, spec.name in settings.evaluation_domains
        )
        for split, prompts in divided.items():
            for prompt in prompts:
                text = sum(len(message.content.encode()) for message in prompt.messages)
                lengths[split].append(min(text + TEMPLATE_TOKENS, settings.prompts.max_prompt_tokens))
    return {split: ExpectedPrompts(len(found), sum(found), max(found, default=0)) for split, found in lengths.items()}
