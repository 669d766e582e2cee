"""Whether a released drafter fits a target and a build, from its `config.json` and headers; loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from dspark.config.models import DrafterSettings, MarkovSettings
from dspark.drafters.config import DrafterConfig
from dspark.drafters.description import trained_config
from dspark.drafters.dialects import flattened, foreign_config, layout_of, with_confidence
from dspark.drafters.styles import STYLES
from dspark.drafters.weights import CONFIG, tensor_names
from dspark.errors import DataError, DsparkError, SettingsError
from dspark.io.jsonfile import read_json, validation_text
from dspark.targets.traits import family_of

if TYPE_CHECKING:
    from dspark.targets.record import TargetRecord

ALIGNED = 8  # numbers; 16 bytes in bfloat16
# What a draft costs besides what a recipe says of it: `profile` measures a random drafter of the target's own shape.
SHAPE = (
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias"),
    *("shared_key_value", "logit_cap"),
)


def read_released_config(folder: Path, record: TargetRecord, error: type[DsparkError] = DataError) -> DrafterConfig:
    """The architecture of a released drafter of a folder with weights; whether it has a confidence head, they say.

    Args:
        error: to raise of a `config.json` that is missing or cannot be read.
    Raises:
        DataError: as `released_config`, no weights, or files of weights that are none.
        IntegrityError: one of our own that cannot be read.
    """
    path = folder / CONFIG
    value = read_json(path, error, "name the folder of the drafter's checkpoint")
    config = released_config(value, record, str(path))
    return with_confidence(config, tensor_names(folder), str(folder))


def released_config(value: Any, record: TargetRecord, where: str) -> DrafterConfig:
    """The architecture of a released drafter that can be imported for a target, as its `config.json` says.

    Args:
        value: its `config.json`.
        where: that was read, for messages.
    Raises:
        DataError: no drafter, one that is not supported, or another target's; names everything that differs.
        IntegrityError: one of our own that cannot be read.
    """
    layout = layout_of(value, where)
    if layout == "bundled":
        raise DataError(
            f"{where}: a target with its drafter inside, which only the engines that serve it can run",
            "dspark import SOURCE --inspect; dspark import SOURCE --out DIR writes engine files and launch commands",
        )
    if layout == "dspark":
        config = trained_config(value, where)
        config.require_target(record, where)
    else:
        config = with_channel(foreign_config(value, record, where))
    _require_target(config, record, where, flattened(value).get("num_target_layers"))
    return config


def with_channel(config: DrafterConfig) -> DrafterConfig:
    """The architecture that a drafter from elsewhere gets here: with a reduced vocabulary, room for a constant channel.

    Without the channel it could not be written with the whole vocabulary, which most engines want (`heads.py`). The
    rank grows to the next multiple of `ALIGNED`, so that the head's rows stay aligned; what the drafter says stays.
    """
    if config.draft_vocab_size is None or config.markov_type == "none":  # the head that stands for none has one
        return config
    return config.model_copy(update={"markov_rank": (config.markov_rank // ALIGNED + 1) * ALIGNED})


def settings_of(config: DrafterConfig, where: str) -> DrafterSettings:
    """What a recipe would have to say to make such a drafter.

    Raises:
        DataError: no recipe could.
    """
    try:
        return DrafterSettings(
            kind=config.kind,
            gamma=config.gamma,
            layers=config.layers,
            markov=MarkovSettings(type=config.markov_type, rank=config.markov_rank),
            confidence=config.confidence,
            draft_vocab_size=config.draft_vocab_size,
        )
    except ValidationError as reason:
        raise DataError(f"{where}: {validation_text(reason)}") from None


def require_declared(config: DrafterConfig, declared: DrafterSettings, build: str) -> None:
    """Refuse a build whose `drafter` section describes another drafter than the imported one: it keys the profiles.

    Raises:
        SettingsError: names every difference.
    """
    size = declared.draft_vocab_size
    here = {
        "kind": declared.kind,
        "gamma": declared.gamma,
        "layers": declared.layers,
        "markov.type": declared.markov.type,
        "markov.rank": declared.markov.rank,
        "confidence": declared.confidence,
        "draft_vocab_size": size if size is not None and size < config.vocab_size else None,
    }
    there = {
        "kind": config.kind,
        "gamma": config.gamma,
        "layers": config.layers,
        "markov.type": config.markov_type,
        "markov.rank": config.markov_rank,
        "confidence": config.confidence,
        "draft_vocab_size": config.draft_vocab_size,
    }
    different = [
        f"drafter.{key} is {here[key]}, the imported drafter's is {there[key]}"
        for key in here
        if here[key] != there[key]
    ]
    if different:
        flags = [f"--set drafter.{key}={_flag(value)}" for key, value in there.items() if here[key] != value]
        if config.confidence != declared.confidence:
            flags.append(
                f"--set training.loss.confidence={int(config.confidence)}"
            )  # a head and its weight go together
        raise SettingsError(f"build {build!r}: {'; '.join(different)}", f"change its file, or add {' '.join(flags)}")


def _flag(value: object) -> str:
    return "null" if value is None else str(value).lower()


def _require_target(config: DrafterConfig, record: TargetRecord, where: str, layers: Any) -> None:
    """Refuse a drafter of another target, as far as taps, mask token and shapes tell.

    Args:
        layers: of its target, as the file says; None: it does not.
    Raises:
        DataError: names every difference, and what to change if the target is the right one.
    """
    if layers is not None and layers != record.num_layers:
        raise DataError(
            f"{where}: its target has {layers} layers, target {record.name} has {record.num_layers}",
            "name the target that the drafter was trained for",
        )
    declared: dict[str, Any] = {}
    different = []
    if config.taps != record.taps:
        different.append(f"it reads the outputs of layers {list(config.taps)}, the taps are {list(record.taps)}")
        declared["taps"] = list(config.taps)
    if config.mask_token_id != record.mask_token_id:
        different.append(f"its mask token is {config.mask_token_id}, the target's is {record.mask_token_id}")
        declared["mask_token_id"] = config.mask_token_id
    if different:
        lines = ", ".join(f"{key}: {value}" for key, value in declared.items())
        raise DataError(
            f"{where}: target {record.name}: {'; '.join(different)}",
            f"if this is its target, say so in pipeline/targets/{record.name}.yaml, or in another file for the same "
            f"model: {lines}",
        )
    expected = family_of(record.architecture).drafter
    if config.layer_style != expected:
        raise DataError(
            f"{where}: it is made of {config.style.name}'s layers, drafters of target {record.name} of "
            f"{STYLES[expected].name}'s",
            "name the target that the drafter was trained for",
        )
    own = DrafterConfig.of(record, settings_of(config, where))
    shapes = [
        f"{key} is {getattr(config, key)}, not {getattr(own, key)}"
        for key in SHAPE
        if getattr(config, key) != getattr(own, key)
    ]
    if shapes:
        raise DataError(
            f"{where}: its layers are not shaped as those of target {record.name}: {'; '.join(shapes)}",
            "drafters of another shape than their target's layers are not supported: their cost could not be profiled",
        )
