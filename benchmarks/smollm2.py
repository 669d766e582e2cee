"""SmolLM2-135M's shape, and drafters for it: what benchmarks without a workspace measure on."""

from typing import Any

from dspark.drafters.config import DrafterConfig

VOCABULARY, WIDTH, TAPS = 49152, 576, (1, 8, 14, 20, 27)


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
