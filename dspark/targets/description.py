"""What a record says about a model folder: taps, mask token, ends of sequence, digests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from dspark.config.models import TargetSpec
from dspark.errors import DataError, PreflightError, SettingsError
from dspark.io.digest import digest_bytes
from dspark.io.jsonfile import strict_loads, validation_text
from dspark.targets.catalogue import read_optional_json
from dspark.targets.completion import complete
from dspark.targets.ends import read_weight
from dspark.targets.layout import TOKENIZER, check_folder
from dspark.targets.loading import load_tokenizer, tensor_digest
from dspark.targets.record import TargetRecord, public_id, public_source, spread_taps
from dspark.targets.shape import differences, shape_of
from dspark.targets.shelf import Listing, Origin
from dspark.targets.template import ChatTemplate
from dspark.targets.traits import FAMILIES, HEAD, unsupported

# Of a config's keys, those that say nothing about the model or name a place on this machine.
_NOISE = (
    *("id2label", "label2id", "problem_type", "output_hidden_states", "output_attentions", "return_dict"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "transformers_version", "_name_or_path", "_model_name_or_path"),
)


def describe(spec: TargetSpec, folder: Path, origin: Origin, listing: Listing) -> TargetRecord:
    """The record of the model in `folder`.

    Raises:
        PreflightError: no chat template, no end-of-sequence token, no token that can serve as mask, or a head and
            embedding that do not fit the config.
        SettingsError: taps or mask token of the specification do not fit the model.
    """
    from transformers import AutoConfig

    check_folder(folder)
    try:
        whole = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as reason:  # whatever transformers and its validators raise, it is about this file
        told = str(reason).strip().splitlines()
        raise PreflightError(
            f"target {spec.name!r}: transformers refuses its config.json: {told[-1].strip() if told else repr(reason)}",
            "mend config.json in the model's folder",
        ) from None
    # What config.json leaves to defaults is known now.
    if mistake := unsupported(strict_loads(whole.to_json_string(use_diff=False))):
        raise PreflightError(f"target {spec.name!r}: {mistake}")
    family, config = FAMILIES[whole.model_type], whole.get_text_config()
    require_declared(spec, _plain(config))
    tokenizer = load_tokenizer(folder)
    try:
        ChatTemplate(tokenizer, spec.thinking_mode).encode_chat([{"role": "user", "content": "Hello"}])
    except DataError as error:
        raise PreflightError(f"target {spec.name!r}: {error.message}", error.hint) from None
    embedding = read_weight(folder, family.embedding)
    head = embedding if whole.tie_word_embeddings else read_weight(folder, HEAD)
    if not embedding.shape == head.shape == (config.vocab_size, config.hidden_size):
        raise PreflightError(f"{folder}: embedding and head are not [vocab_size, hidden_size] of config.json")
    dtype = getattr(torch, spec.dtype)
    embedding_digest = tensor_digest(embedding.to(dtype))
    mask = spec.mask_token_id if spec.mask_token_id is not None else find_mask_token(tokenizer, config.vocab_size)
    if mask is None:
        raise PreflightError(
            f"target {spec.name!r}: no token id that never occurs in text was found to serve as mask",
            f"set mask_token_id in pipeline/targets/{spec.name}.yaml",
        )
    try:
        return TargetRecord(
            name=spec.name,
            source=public_source(spec),
            revision=origin.revision,
            public_id=public_id(spec),
            digest=origin.digest,
            weights_digest=listing.weights_digest,
            embedding_digest=embedding_digest,
            head_digest=embedding_digest if head is embedding else tensor_digest(head.to(dtype)),
            tokenizer_digest=listing.digest_of(TOKENIZER),
            chat_template_digest=digest_bytes(tokenizer.chat_template.encode("utf-8")),
            dtype=spec.dtype,
            quantisation=origin.quantisation,
            model_type=config.model_type,
            architecture=family.architecture,
            text_config=_plain(config),
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            vocab_logical=len(tokenizer),
            vocab_physical=config.vocab_size,
            max_position=config.max_position_embeddings,
            taps=spec.taps if spec.taps is not None else spread_taps(config.num_hidden_layers),
            mask_token_id=mask,
            eos_token_ids=eos_token_ids(folder, config, tokenizer),
            sampling=spec.sampling,
            thinking_mode=spec.thinking_mode,
        )
    except ValidationError as error:
        raise SettingsError(
            f"pipeline/targets/{spec.name}.yaml does not fit the model: {validation_text(error)}",
            f"dspark targets show {spec.name}",
        ) from None


def require_declared(spec: TargetSpec, text: Mapping[str, Any]) -> None:
    """Refuse a model of another size than the catalogue declares.

    Args:
        text: the text part of its config, complete.
    Raises:
        SettingsError: names what differs, with both values.
    """
    if spec.config is None:
        return
    where = f"pipeline/targets/{spec.name}.yaml: config"
    if wrong := differences(shape_of(complete(spec.config, where)), shape_of(text)):
        raise SettingsError(f"{where}: {'; '.join(wrong)}", "correct it, or leave config out")


def find_mask_token(tokenizer: Any, vocab_physical: int) -> int | None:
    """A token id that no text has: the tokenizer's mask token, else an embedding row beyond its last id, else a token
    that its makers kept in reserve. None if there is none of these."""
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    if len(tokenizer) < vocab_physical:
        return len(tokenizer)
    spare = re.compile(r"reserved|unused", re.IGNORECASE)
    reserve = [number for number, token in tokenizer.added_tokens_decoder.items() if spare.search(token.content)]
    return min(reserve, default=None)


def eos_token_ids(folder: Path, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end the target's turn: those of the generation config (else of the config) and of the tokenizer."""
    declared = read_optional_json(folder / "generation_config.json").get("eos_token_id", config.eos_token_id)
    ids = {declared} if isinstance(declared, int) else set(declared or ())
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    return tuple(sorted(ids))


def _plain(config: Any) -> dict[str, Any]:
    """The config as JSON, without noise."""
    value: dict[str, Any] = strict_loads(config.to_json_string(use_diff=False))
    return {key: item for key, item in value.items() if key not in _NOISE}
