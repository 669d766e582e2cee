"""A target as ONNX: one graph with its keys and values in and out, for decoding without torch.

A package holds the drafter; whoever decodes with it needs the target's logits and taps from somewhere. Where no engine
is at hand that has both, this graph is the target, and ONNX Runtime the engine. It is compared with torch before it
counts (package.md: an export is right when the tokens are).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.drafters.config import SUPPORTED_ROPE, rope_parameters
from dspark.engines.onnx_io import IO_FILE, GraphSpec, TensorSpec
from dspark.engines.onnx_target_io import TARGET, TARGET_WEIGHTS, TOKENIZER, ChatText, OnnxTargetIO
from dspark.engines.onnxruntime import open_session
from dspark.errors import DataError, GateError, SettingsError
from dspark.export.onnx_files import describe_weights, floats, integers, move_weights, trace, write_graph
from dspark.export.target_graph import TargetStep, product_attention
from dspark.export.target_parity import Arrays, Geometry, compare_target
from dspark.io.atomic import replaced_tree, write_text
from dspark.io.jsonfile import read_model, write_model
from dspark.io.progress import Progress
from dspark.targets.loading import Target

# Texts whose tokens tell tokenizers apart.
_PROBES = (
    "Hello",
    "What is 12 * 7?\n\nThink first.",
    "def f(x):\n\treturn x  # 1",
    "Grüße, 你好, 🎉",
    "'a' &amp; \"b\" ...",
)


def export_target(
    target: Target,
    prompts: Sequence[Sequence[int]],
    out: Path,
    *,
    new_tokens: int = 16,
    opset: int = 20,
    progress: Progress | None = None,
) -> OnnxTargetIO:
    """Write the graph, its weights, the tokenizer and `io.json`; compare with torch; appear at `out` by one rename.

    Args:
        target: in float32, on the CPU.
        prompts: token ids of rendered prompts to compare on.
        out: a folder that is not there, is empty, or holds an earlier export.
        new_tokens: that torch answers to each prompt.
        opset: of the default ONNX domain.
        progress: advanced after tracing, after writing and after each prompt.
    Raises:
        DataError: the target is not in float32, or there are no prompts.
        SettingsError: `out` holds something else, or the target has layers that the graph cannot follow.
        StageError: the graph that came out is not valid ONNX or needs another opset or domain.
        PreflightError: ONNX Runtime is not installed.
        GateError: the graph does not say what the target says; nothing is left at `out`.
    """
    check_place(out)
    _check_target(target, prompts)
    progress = progress or Progress()
    progress.start(f"export {target.record.name}", 2 + len(prompts), unit="steps")
    geometry = Geometry.of(target.model.config.get_text_config())
    with replaced_tree(out) as folder:
        description = _write(target, geometry, folder, prompts, new_tokens, opset, progress)
        compared = description.compared
        if compared.verdict != "equal":
            raise GateError(
                f"{target.record.name}: its ONNX graph is not the target: {compared.differing_tokens} of "
                f"{compared.greedy_tokens} greedy tokens differ ({compared.first_difference or 'none'}), logits by up "
                f"to {compared.max_logit_difference:.2g}, features by up to {compared.max_feature_difference:.2g}",
                "this is a fault of the exporter or of ONNX Runtime; report it with these figures",
            )
    return description


def check_place(out: Path) -> None:
    """Refuse to write over what is no export of a target.

    Raises:
        SettingsError: `out` is a file, or a folder that holds something else.
    """
    if not out.absolute().parent.is_dir():
        raise SettingsError(f"{out}: there is no folder {out.absolute().parent}", "name a folder in one that is there")
    if not out.exists():
        return
    if not out.is_dir():
        raise SettingsError(f"{out} is not a folder", "name a folder that is not there yet")
    if any(out.iterdir()):
        try:
            read_model(out / IO_FILE, OnnxTargetIO)
        except DataError as reason:
            raise SettingsError(
                f"{out} holds something else than an exported target ({reason.message})",
                "name a folder that is not there yet",
            ) from None


def _check_target(target: Target, prompts: Sequence[Sequence[int]]) -> None:
    name = target.record.name
    if target.dtype != torch.float32:
        raise DataError(f"target {name}: exported in float32, it is loaded in {target.dtype}", "load it in float32")
    if not prompts:
        raise DataError(f"target {name}: there are no prompts to compare its export on")
    if reason := _no_graph(target):
        raise SettingsError(f"target {name}: it cannot be exported: {reason}", "decode it with torch")
    kind = rope_parameters(target.record.text_config)["rope_type"]
    if kind not in SUPPORTED_ROPE:
        raise SettingsError(
            f"target {name}: RoPE type {kind!r} depends on the length of the sequence, which a graph with cached keys "
            "cannot follow",
            f"use a target with one of {', '.join(SUPPORTED_ROPE)}",
        )


def _no_graph(target: Target) -> str | None:
    """Why the one graph, with one mask, one rotation and one shape of keys for all layers, cannot be this target."""
    text = target.record.text_config
    if any(target.windows):
        return "some of its layers attend within a window, and the graph has one mask for all"
    if target.family.drafter == "gemma4":
        return "its layers turn positions and shape keys by kind, and the graph has one rotation and shape for all"
    if text.get("num_experts") or text.get("num_local_experts"):
        return "its layers choose experts token by token, which a traced graph does not"
    return None


def _write(
    target: Target,
    geometry: Geometry,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    opset: int,
    progress: Progress,
) -> OnnxTargetIO:
    """All files into an empty folder; the comparison is in the description, not yet judged."""
    record = target.record
    spec = _spec(target, geometry)
    with product_attention(target):
        model = trace(TargetStep(target), _example(geometry), spec, opset)
    progress.advance()
    move_weights([model], folder / TARGET_WEIGHTS, lambda digest: True)
    write_graph(model, folder / TARGET, opset)
    progress.advance()
    chat = _write_tokenizer(target, folder, progress)
    session = open_session(folder / TARGET, threads=torch.get_num_threads())

    def run(*inputs: Any) -> Arrays:
        outputs: Arrays = tuple(session.run(None, dict(zip([item.name for item in spec.inputs], inputs, strict=True))))
        return outputs

    description = OnnxTargetIO(
        name=record.name,
        public_id=record.public_id,
        revision=record.revision,
        opset=opset,
        graph=spec,
        weights=describe_weights(folder / TARGET_WEIGHTS),
        taps=record.taps,
        hidden_size=record.hidden_size,
        layers=geometry.layers,
        num_key_value_heads=geometry.heads,
        head_dim=geometry.head_dim,
        vocab_size=record.vocab_physical,
        max_position=record.max_position,
        mask_token_id=record.mask_token_id,
        eos_token_ids=record.eos_token_ids,
        embedding_digest=record.embedding_digest,
        head_digest=record.head_digest,
        tokenizer=TOKENIZER if (folder / TOKENIZER).is_file() else None,
        chat=chat,
        compared=compare_target(target, geometry, run, prompts, new_tokens=new_tokens, progress=progress),
    )
    write_model(folder / IO_FILE, description)
    return description


# ---------------------------------------------------------------- inputs and outputs


def _spec(target: Target, geometry: Geometry) -> GraphSpec:
    def state(name: str, axis: str, meaning: str) -> TensorSpec:
        return floats(name, geometry.layers, "batch", geometry.heads, axis, geometry.head_dim, meaning=meaning)

    record = target.record
    width = len(record.taps) * record.hidden_size
    return GraphSpec(
        file=TARGET,
        inputs=(
            integers("token_ids", "batch", "new", meaning="tokens at positions past_length, past_length + 1, ..."),
            state("past_keys", "past", "keys of positions 0, 1, ..."),
            state("past_values", "past", "values of positions 0, 1, ..."),
            integers("past_length", "batch", meaning="past positions of the row that count, the rest is masked"),
        ),
        outputs=(
            floats("logits", "batch", "new", record.vocab_physical, meaning="of the token after each"),
            floats("features", "batch", "new", width, meaning="taps of each, concatenated: what the drafter reads"),
            state("new_keys", "new", "keys to store behind the row's past, of the tokens that stay"),
            state("new_values", "new", "values to store behind the row's past, of the tokens that stay"),
        ),
    )


def _example(geometry: Geometry) -> tuple[Tensor, ...]:
    past = torch.zeros(geometry.layers, 2, geometry.heads, 7, geometry.head_dim)
    return torch.zeros(2, 5, dtype=torch.int64), past, past.clone(), torch.tensor([6, 7])


# ---------------------------------------------------------------- tokenizer


def _write_tokenizer(target: Target, folder: Path, progress: Progress) -> ChatText | None:
    """Write the tokenizer, if it is of the kind that is read without transformers; returns the text around a message.

    Raises:
        GateError: alone it gives other tokens than the target is prompted with.
    """
    backend = getattr(target.tokenizer, "backend_tokenizer", None)
    if backend is None:
        progress.note(f"{target.record.name}: its tokenizer cannot be read without transformers and is left out")
        return None
    write_text(folder / TOKENIZER, backend.to_str(pretty=False))
    try:
        before, after = target.template.around_message()
    except DataError as reason:
        progress.note(f"{target.record.name}: prompts must be given as token ids: {reason.message}")
        return None
    from tokenizers import Tokenizer

    alone = Tokenizer.from_file(str(folder / TOKENIZER))
    for text in _PROBES:
        expected = target.template.encode_chat([{"role": "user", "content": text}])
        if alone.encode(before + text + after, add_special_tokens=False).ids != expected:
            raise GateError(
                f"{target.record.name}: {TOKENIZER} alone does not give the tokens that the target is prompted with",
                f"this is a fault of the exporter; report it with the text {text!r}",
            )
    return ChatText(before=before, after=after)
