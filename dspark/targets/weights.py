"""Whether a model folder's weights are those that its config speaks of, and numbers at all.

The first is told by the headers alone, before anything is read: transformers fills in weights that are missing with
random ones and drops those it has no place for, both with no more than a warning. The second takes one pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dspark.config.models import DType
from dspark.errors import PreflightError, SettingsError
from dspark.targets.completion import complete
from dspark.targets.layout import stored_shapes, weight_files
from dspark.targets.shape import TargetShape, shape_of
from dspark.targets.traits import FAMILIES, HEAD

_COMPUTED = ("rotary_emb.inv_freq",)  # stored by old writers, worked out from the config by every reader
_PIECE = 1 << 24  # numbers looked at in one go


def check_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a folder whose weights are not those of its config; reads headers only.

    A layer is compared by how many weights it has, so that it is the same whether experts are stored one by one or
    together; embedding, final norm and head by their shapes.

    Args:
        config: its `config.json`, of a supported family.
    Raises:
        PreflightError: names the layer or the tensor.
    """
    try:
        text = complete(config, f"{folder}: its config.json")
        shape = shape_of(text)
    except (SettingsError, KeyError, ValueError) as reason:
        told = reason.message if isinstance(reason, SettingsError) else f"{folder}: its config.json: {reason}"
        raise PreflightError(told, "mend config.json in the model's folder") from None
    tied = bool(config.get("tie_word_embeddings", shape.tie_word_embeddings))
    if mistake := _mistake(shape, tied, FAMILIES[str(config["model_type"])].decoder, stored_shapes(folder)):
        raise PreflightError(
            f"{folder}: config.json and the weights do not belong together: {mistake}",
            "give the config.json that the weights were saved with, or copy the model folder again",
        )


def check_finite(folder: Path, dtype: DType, on_file: Callable[[], None] = lambda: None) -> None:
    """Refuse weights that are NaN or infinite, as they are or once they are in the dtype that they are loaded in.

    Args:
        on_file: called after each file that was read; may raise to stop.
    Raises:
        PreflightError: names the first such tensor, and how many there are in its file.
    """
    import torch
    from safetensors import safe_open

    wanted = getattr(torch, dtype)
    for file in weight_files(folder):
        broken: dict[str, str] = {}
        with safe_open(folder / file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                stored = handle.get_tensor(name)
                if not stored.is_floating_point():
                    continue
                for piece in stored.flatten().split(_PIECE):
                    if not _finite(piece):
                        broken[name] = "is not finite (NaN or infinity)"
                    elif wanted == torch.float16 and not _finite(piece.to(wanted)):
                        broken[name] = f"is too large for {dtype}"
                    if name in broken:
                        break
        if broken:
            name, what = next(iter(broken.items()))
            more = f", and {len(broken) - 1} further tensors" if len(broken) > 1 else ""
            raise PreflightError(
                f"{(folder / file).resolve()}: {name} {what}{more}: no text can come of such weights",
                "set the target's dtype to bfloat16 or float32"
                if what.startswith("is too large")
                else "save or download the model again; it is not a model that works",
            )
        on_file()


def _finite(values: Any) -> bool:
    """Whether all of a tensor's numbers are; NaN and infinities show in the extremes, which costs no copy."""
    values = values.float() if values.element_size() == 1 else values  # 8 bits have no order of their own in torch
    return values.numel() == 0 or all(math.isfinite(float(end)) for end in values.aminmax())


def _mistake(shape: TargetShape, tied: bool, decoder: str, stored: Mapping[str, tuple[int, ...]]) -> str | None:
    """What the first disagreement is, or None."""
    layers = _by_layer(decoder, stored)
    count, found = len(shape.layers), max(layers, default=-1) + 1
    if found != count:
        return f"num_hidden_layers is {count}, the weights have {found} layers"
    ends: dict[str, tuple[int, ...]] = {f"{decoder}.embed_tokens.weight": (shape.vocab_size, shape.hidden_size)}
    ends[f"{decoder}.norm.weight"] = (shape.hidden_size,)
    if not tied:
        ends[HEAD] = (shape.vocab_size, shape.hidden_size)
    for name, wanted in ends.items():
        if name not in stored:
            return f"there is no {name}"
        if stored[name] != wanted:
            return f"{name} is {list(stored[name])}, by config.json it is {list(wanted)}"
    for number in range(count):
        own = layers.get(number, {})
        has, needs = sum(map(math.prod, own.values())), shape.layer_parameters(number)
        # Gemma 4 stores keys and values of layers that read an earlier layer's, and scales that are no weights.
        if has < needs or (has > needs and not shape.model_type.startswith("gemma4")):
            return f"layer {number} has {has} weights, by config.json it has {needs}{_lacking(number, layers, shape)}"
    return None


def _by_layer(decoder: str, stored: Mapping[str, tuple[int, ...]]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Shapes by layer and by name within the layer."""
    layers: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, shape in stored.items():
        found = re.fullmatch(rf"{re.escape(decoder)}\.layers\.(\d+)\.(.+)", name)
        if found and not name.endswith(_COMPUTED):
            layers.setdefault(int(found[1]), {})[found[2]] = shape
    return layers


def _lacking(number: int, layers: Mapping[int, Mapping[str, tuple[int, ...]]], shape: TargetShape) -> str:
    """What layers of the same kind have and this one does not, by name."""
    alike = {name for other, own in layers.items() if shape.layers[other] == shape.layers[number] for name in own}
    lacking = sorted(alike - set(layers.get(number, {})))
    return f": it lacks {', '.join(lacking)}" if lacking else ""
