"""Closed forms of a drafter's size, held against the networks themselves and against DeepSpec's published figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dspark.config.models import DrafterSettings, RecipeSpec
from dspark.drafters.config import DrafterConfig
from dspark.drafters.kinds import build_drafter
from dspark.drafters.sizes import drafter_size
from dspark.io.yamlfile import read_yaml
from dspark.targets.catalogue import read_target
from dspark.targets.completion import complete
from dspark.targets.shape import LayerShape, TargetShape, shape_of

PIPELINE = Path(__file__).parents[3] / "pipeline"
RECIPES = sorted((PIPELINE / "recipes").glob("*.yaml"))


def settings_of(path, **changes):
    value = {"name": path.stem, **read_yaml(path)}
    drafter = RecipeSpec.model_validate(value).drafter.model_dump()
    if drafter["markov"]["type"] != "none":
        drafter["markov"]["rank"] = 4
    return DrafterSettings.model_validate(drafter | changes)


def network(make_config, settings, **changes):
    config = make_config(
        kind=settings.kind,
        gamma=settings.gamma,
        layers=settings.layers,
        markov_type=settings.markov.type,
        markov_rank=settings.markov.rank,
        confidence=settings.confidence,
        draft_vocab_size=settings.draft_vocab_size,
        **changes,
    )
    ends = torch.zeros(config.vocab_size, config.hidden_size)
    ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
    return config, build_drafter(config, ends, ends, ids)


def shape_like(config: DrafterConfig) -> TargetShape:
    layer = LayerShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim, intermediate_size=48)
    bias = "all" if config.attention_bias else "none"
    return TargetShape("llama", config.hidden_size, config.vocab_size, True, 48, (layer,) * 6, attention_bias=bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_parameters_are_those_of_the_network(make_config, path, bias):
    settings = settings_of(path)
    config, drafter = network(make_config, settings, attention_bias=bias)
    found = drafter_size(shape_like(config), len(config.taps), settings)
    assert found.parameters == sum(parameter.numel() for parameter in drafter.parameters())
    # What the optimizer calls matrices of the backbone (training.optimisation).
    heads = ("markov_head.", "confidence_head.")
    named = [item for item in drafter.named_parameters() if item[1].dim() > 1 and not item[0].startswith(heads)]
    assert sorted(found.backbone) == sorted(tuple(parameter.shape) for _, parameter in named)


def test_a_reduced_vocabulary_is_counted(make_config):
    settings = settings_of(PIPELINE / "recipes/dspark.yaml", draft_vocab_size=12)
    config, drafter = network(make_config, settings)
    found = drafter_size(shape_like(config), len(config.taps), settings)
    assert found.proposed == 12
    assert found.parameters == sum(parameter.numel() for parameter in drafter.parameters())
    whole = drafter_size(shape_like(config), len(config.taps), settings.model_copy(update={"draft_vocab_size": 10**6}))
    assert whole.proposed == config.vocab_size


# deepspec.md, section 1.3: five taps, five layers, rank 256.
@pytest.mark.parametrize(
    ("name", "trainable", "layer", "projection"),
    [
        ("qwen3-4b", 615, 100.9, 32.8),
        ("qwen3-8b", 1126, 193.0, 83.9),
        ("qwen3-14b", 1860, 330.3, 131.1),
        ("gemma4-12b", 1417, 241.8, 73.7),
    ],
)
def test_it_gives_the_published_counts(name, trainable, layer, projection):
    spec = read_target(PIPELINE / "targets", name)
    found = drafter_size(shape_of(complete(spec.config, name)), 5, DrafterSettings(gamma=7, layers=5))
    assert round(found.parameters / 1e6) == trainable
    assert found.backbone[0][0] * found.backbone[0][1] == pytest.approx(projection * 1e6, abs=5e4)
    assert found.slot_products / 5 == pytest.approx(layer * 1e6, abs=7e4)  # norms are not products
