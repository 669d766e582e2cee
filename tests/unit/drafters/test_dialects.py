"""Whose `config.json` it is, and what no drafter here can be."""

from __future__ import annotations

from typing import Any

import pytest

from dspark.drafters.dialects import layout_of
from dspark.errors import DataError


@pytest.mark.parametrize(
    ("value", "layout"),
    [
        ({"architectures": ["Qwen3DSparkModel"], "block_size": 7}, "deepspec"),
        ({"architectures": ["Gemma4DSparkModel"], "block_size": 7}, "deepspec"),
        ({"architectures": ["Qwen3Eagle3Model"], "ttt_length": 7}, "deepspec"),
        ({"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dspark"}}, "specforge"),
        ({"architectures": ["DSparkDraftModel"], "dflash_config": {"block_size": 7}}, "specforge"),
        # As save_pretrained of speculators 0.9.0 calls it, and as the class is declared.
        ({"architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark"}, "speculators"),
        ({"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark"}, "speculators"),
        ({"architectures": ["Qwen3DSparkModel"], "dspark": {}, "speculators_model_type": "dspark"}, "dspark"),
        ({"architectures": ["DeepseekV4ForCausalLM"], "dspark_block_size": 5}, "bundled"),
    ],
)
def test_layouts_are_told_apart(value: dict[str, Any], layout: str) -> None:
    assert layout_of(value, "config.json") == layout


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "not a JSON object"),
        ({}, "architectures is None"),
        ({"architectures": ["Qwen3ForCausalLM"], "block_size": 7}, r"architectures is \['Qwen3ForCausalLM'\]"),
        ({"architectures": ["Gemma4Eagle3Model"], "ttt_length": 7}, "as DeepSpec stores it for Qwen3"),
        ({"architectures": ["Qwen3DSparkModel"]}, "no block_size, neither here nor in dflash_config"),
        ({"architectures": ["Qwen3Eagle3Model"], "block_size": 7}, "no ttt_length"),
        ({"architectures": ["DFlashDraftModel"], "block_size": 16}, "with markov_rank 0, its first slot drafts"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, r"Qwen3Eagle3Model, with the whole vocabulary\)"),
        ({"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dflash"}}, "is 'dflash'"),
        ({"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "domino"}}, "is 'domino'"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "of the kind 'eagle3'"),
        ({"speculators_config": {}}, "of the kind None"),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(value: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason) as refused:
        layout_of(value, "config.json")
    assert "what can be imported" in refused.value.hint
