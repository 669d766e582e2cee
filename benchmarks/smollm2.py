"""SmolLM2-135M's shape, random targets of it and drafters for it: what benchmarks without a workspace measure on."""

from pathlib import Path
from typing import Any

from dspark.config.models import TargetSpec
from dspark.drafters.config import DrafterConfig
from dspark.targets.loading import Target, load_target
from dspark.targets.materialise import materialise

VOCABULARY, WIDTH, TAPS = 49152, 576, (1, 8, 14, 20, 27)
SHAPE = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def random_target(root: Path) -> Target:
    """A target of that shape with random weights in float32, made in the workspace `root`."""
    source = {"kind": "random", "config": SHAPE}
    spec = TargetSpec.model_validate({"name": "smollm2", "source": source, "dtype": "float32"})
    return load_target(materialise(spec, root=root), root)


def drafter_config(**rest: Any) -> DrafterConfig:
    """A drafter's config; `rest` has at least gamma, layers and markov_rank."""
    return DrafterConfig(
        taps=TAPS,
        mask_token_id=3,
        hidden_size=WIDTH,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope={"rope_type": "default", "rope_theta": 1e5},
        max_position=8192,
        vocab_size=VOCABULARY,
        target_model_type="llama",
        num_target_layers=30,
        **rest,
    )
