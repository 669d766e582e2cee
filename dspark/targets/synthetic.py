"""Tiny targets made on the spot: random weights, one token per byte, ChatML. For tests and the smoke build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspark.config.models import DType, RandomSource
from dspark.errors import SettingsError

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")  # ids 0 to 3; bytes follow
VOCABULARY = len(CONTROL) + 256
CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """A tokenizer that knows the 256 bytes and four control tokens: every text is exact, nothing is learnt."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*CONTROL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=CONTROL[0],
        bos_token=CONTROL[1],
        eos_token=CONTROL[2],
        mask_token=CONTROL[3],
    )
    wrapped.chat_template = CHATML
    return wrapped


def make_target(source: RandomSource, out: Path, dtype: DType) -> None:
    """Write a target with random weights drawn from the source's seed.

    Raises:
        SettingsError: transformers does not take the config, or its vocabulary is too small for bytes.
    """
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    from dspark.targets.loading import quiet_transformers

    quiet_transformers()
    tokenizer = byte_tokenizer()
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    try:
        config = AutoConfig.for_model(**_completed(source.config, {"vocab_size": VOCABULARY, **special}))
    except (TypeError, ValueError, StrictDataclassError) as reason:
        raise SettingsError(f"source.config: {reason}") from None
    vocabulary = config.get_text_config().vocab_size
    if vocabulary < VOCABULARY:
        raise SettingsError(f"source.config.vocab_size is {vocabulary}, bytes need {VOCABULARY}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(source.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(getattr(torch, dtype)).save_pretrained(out)
    tokenizer.save_pretrained(out)


def _completed(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A config with what it leaves out; of a model that also sees or hears, its text part with it."""
    if isinstance(text := config.get("text_config"), dict):
        return config | {"text_config": defaults | text}
    return defaults | config
