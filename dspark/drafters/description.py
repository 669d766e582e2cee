"""`config.json` of a drafter: one description that every consumer reads (engine-formats.md, section 0).

Flat layer and DeepSpec fields for SGLang, vLLM and llama.cpp's converter, and the speculators fields beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import ValidationError

from dspark.drafters.config import DrafterConfig, rope_parameters
from dspark.drafters.styles import STYLES, style_named
from dspark.errors import IntegrityError
from dspark.io.jsonfile import validation_text
from dspark.targets.traits import FULL, DrafterLayers, logit_cap

if TYPE_CHECKING:
    from dspark.targets.record import TargetRecord

Dialect = Literal["training", "union", "deepspec"]


@dataclass(frozen=True)
class _Form:
    """How consumers call drafters of a kind and what they have to be told of all of them.

    Attributes:
        architectures: by the drafter's layers, what engines dispatch on, whatever the target's family.
        evaluated: likewise, what DeepSpec's evaluator dispatches on.
        algorithm: the kind as speculators calls it.
        inputs: the key of the taps as layer inputs, indices into hidden_states.
        fixed: fields of which readers disagree on the defaults: always written, and anything else is refused.
    """

    architectures: Mapping[DrafterLayers, str]
    evaluated: Mapping[DrafterLayers, str]
    algorithm: str
    inputs: str
    fixed: Mapping[str, Any]

    def architecture(self, layer_style: DrafterLayers, dialect: Dialect) -> str:
        """What the readers of a dialect dispatch on."""
        return (self.evaluated if dialect == "deepspec" else self.architectures)[layer_style]


_BLOCKS: Mapping[DrafterLayers, str] = {"qwen3": "Qwen3DSparkModel", "gemma4": "Gemma4DSparkModel"}
_FORMS: Mapping[str, _Form] = {
    "dspark": _Form(
        architectures=_BLOCKS,
        evaluated=_BLOCKS,
        algorithm="dspark",
        inputs="aux_hidden_state_layer_ids",
        fixed={"sample_from_anchor": True, "is_causal": False, "sliding_window_non_causal": False},
    ),
    "eagle3": _Form(
        architectures={"qwen3": "Eagle3Qwen3ForCausalLM"},
        evaluated={"qwen3": "Qwen3Eagle3Model"},
        algorithm="eagle3",
        inputs="eagle_aux_hidden_state_layer_ids",
        # A chain is causal. The state is added and handed on un-normed, and nothing is normed before `fc`.
        fixed={
            "is_causal": True,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "embed_requires_grad": False,
        },
    ),
}


def describe(
    config: DrafterConfig,
    record: TargetRecord,
    *,
    dialect: Dialect,
    dtype: str,
    weights_sha256: str,
    trained: DrafterConfig | None = None,
) -> dict[str, Any]:
    """The content of `config.json`.

    The union dialect describes the drafter as engines see it, with the whole vocabulary. The one key of our own,
    `dspark`, says which dialect this is, what the weights' digest is and which target they belong to. Only the dialect
    of DeepSpec's own evaluator stores the target's embedding and head.

    Args:
        config: of the stored weights.
        dtype: of the stored weights.
        trained: what was trained, where that is stored in another form; None: `config`.
    """
    trained, form, layers = trained or config, _FORMS[config.kind], _layer_fields(config)
    return {
        **layers,
        **form.fixed,
        "has_embed_tokens": dialect == "deepspec",
        "architectures": [form.architecture(config.layer_style, dialect)],
        "dtype": dtype,
        "eos_token_id": list(record.eos_token_ids),
        "block_size": config.gamma,
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.taps),  # 0-based layers, their outputs
        form.inputs: [tap + 1 for tap in config.taps],  # indices into hidden_states, embedding first
        "target_hidden_size": config.hidden_size,
        **_head_fields(config),
        **(_chain_fields(config, dialect) if config.kind == "eagle3" else {}),
        "draft_vocab_size": config.proposed_vocab_size if dialect == "training" else config.vocab_size,
        # speculators knows Qwen3's layers alone.
        **(_speculators_fields(config, record, layers) if config.layer_style == "qwen3" else {}),
        "dspark": {
            "dialect": dialect,
            "kind": config.kind,
            "weights_sha256": weights_sha256,
            "proposed_vocab_size": trained.proposed_vocab_size,
            "markov_type": trained.markov_type,
            "target": {
                "name": record.public_id or record.name,
                "model_type": config.target_model_type,
                "revision": record.revision,
                "embedding_digest": record.embedding_digest,
                "head_digest": record.head_digest,
            },
        },
    }


def read_description(value: Any, where: str) -> tuple[DrafterConfig, dict[str, Any]]:
    """The config that a `config.json` describes, and its `dspark` part.

    Raises:
        IntegrityError: if it isn't a drafter this version can run; says which field is why.
    """
    if not isinstance(value, dict):
        raise IntegrityError(f"{where}: not a JSON object")
    own = value.get("dspark")
    if not isinstance(own, dict) or own.get("dialect") not in get_args(Dialect):
        raise IntegrityError(f"{where}: not written by dspark (no valid 'dspark' entry)")
    kind = own.get("kind", "dspark")  # files of before name none
    if not isinstance(kind, str) or kind not in _FORMS:
        raise IntegrityError(f"{where}: a drafter of kind {kind!r}, which this version does not know")
    form, layer_style = _FORMS[kind], style_named(value.get("model_type"))
    if layer_style is None or layer_style not in form.architectures:
        known = ", ".join(repr(STYLES[name].model_type) for name in form.architectures)
        raise IntegrityError(
            f"{where}: model_type is {value.get('model_type')!r}, drafters of kind {kind} are of {known}"
        )
    expected = {
        **form.fixed,
        "has_embed_tokens": own["dialect"] == "deepspec",
        "architectures": [form.architecture(layer_style, own["dialect"])],
    }
    wrong = [f"{key} is {value.get(key)!r}, not {want!r}" for key, want in expected.items() if value.get(key) != want]
    if wrong:
        raise IntegrityError(f"{where}: {'; '.join(wrong)}")
    try:
        taps = tuple(value["target_layer_ids"])
        if [tap + 1 for tap in taps] != value[form.inputs]:
            raise IntegrityError(f"{where}: {form.inputs} must be target_layer_ids + 1")
        proposed, vocabulary = value["draft_vocab_size"], value["vocab_size"]
        confidence = value["enable_confidence_head"]
        if value["confidence_head_with_markov"] is not confidence:
            raise IntegrityError(f"{where}: a confidence head reads the sequential head in every drafter of dspark")
        config = DrafterConfig(
            kind=kind,
            gamma=value["block_size"],
            layers=value["num_hidden_layers"],
            taps=taps,
            mask_token_id=value["mask_token_id"],
            hidden_size=value["hidden_size"],
            intermediate_size=value["intermediate_size"],
            num_attention_heads=value["num_attention_heads"],
            num_key_value_heads=value["num_key_value_heads"],
            head_dim=value["head_dim"],
            rms_norm_eps=value["rms_norm_eps"],
            rope=rope_parameters(value),
            max_position=value["max_position_embeddings"],
            vocab_size=vocabulary,
            markov_type=value["markov_head_type"] if value["markov_rank"] else "none",
            markov_rank=value["markov_rank"],
            confidence=confidence,
            draft_vocab_size=proposed if proposed != vocabulary else None,
            attention_bias=value["attention_bias"],
            layer_style=layer_style,
            shared_key_value=bool(value.get("attention_k_eq_v", False)),
            logit_cap=logit_cap(value),
            target_model_type=own["target"]["model_type"],
            num_target_layers=value["num_target_layers"],
        )
    except KeyError as missing:
        raise IntegrityError(f"{where}: {missing} is missing") from None
    except ValidationError as reason:
        raise IntegrityError(f"{where}: {validation_text(reason)}") from None
    except TypeError as reason:
        raise IntegrityError(f"{where}: {reason}") from None
    told = _layer_fields(config)
    if wrong := [f"{key} is {value.get(key)!r}, not {told[key]!r}" for key in told if value.get(key) != told[key]]:
        raise IntegrityError(f"{where}: it contradicts itself: {'; '.join(wrong)}")
    return config, own


def trained_config(value: Any, where: str) -> DrafterConfig:
    """The config as it was trained: the union dialect tells us alone of a reduced vocabulary or a missing head.

    Raises:
        IntegrityError: as `read_description`.
    """
    config, own = read_description(value, where)
    changes: dict[str, Any] = {}
    size = own.get("proposed_vocab_size", config.proposed_vocab_size)
    if size != config.proposed_vocab_size:
        changes["draft_vocab_size"] = size
    if own.get("markov_type", config.markov_type) == "none":
        changes |= {"markov_type": "none", "markov_rank": 0}
    return config.model_copy(update=changes)


def _head_fields(config: DrafterConfig) -> dict[str, Any]:
    """Which heads there are. DeepSpec names a type only of a head that is there, and so do all who follow it."""
    kind = {"markov_head_type": config.markov_type} if config.markov_rank else {}
    return {
        "markov_rank": config.markov_rank,
        **kind,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence,
    }


def _chain_fields(config: DrafterConfig, dialect: Dialect) -> dict[str, Any]:
    """What is said of EAGLE-3 besides: how many layers are tapped, of which readers assume three."""
    fields: dict[str, Any] = {"num_aux_hidden_states": len(config.taps), "num_aux_layers": len(config.taps)}
    if dialect == "deepspec":
        # Its model insists on the decay that it was trained with, and does not read it.
        fields |= {"ttt_length": config.gamma, "draft_num_hidden_layers": config.layers, "step_loss_decay": 1.0}
    return fields


def _layer_fields(config: DrafterConfig) -> dict[str, Any]:
    style = config.style
    fields = {
        "model_type": style.model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        style.activation_key: style.activation,
        "attention_bias": config.attention_bias,
        "max_position_embeddings": config.max_position,
        "layer_types": [FULL] * config.layers,
        "tie_word_embeddings": False,
    }
    return fields | (_gemma4_fields(config) if config.layer_style == "gemma4" else _rope_fields(config))


def _rope_fields(config: DrafterConfig) -> dict[str, Any]:
    """RoPE in both spellings: older readers know only the second."""
    fields = {"rope_parameters": dict(config.rope), "rope_theta": config.rope["rope_theta"]}
    if config.rope["rope_type"] != "default":
        scaling = {key: value for key, value in config.rope.items() if key != "rope_theta"}
        fields["rope_scaling"] = scaling | {"type": config.rope["rope_type"]}
    return fields


def _gemma4_fields(config: DrafterConfig) -> dict[str, Any]:
    """What Gemma 4's config tells besides: the one geometry that all layers have is that of its global attention."""
    return {
        "rope_parameters": {FULL: dict(config.rope)},
        "global_head_dim": config.head_dim,
        "num_global_key_value_heads": config.num_key_value_heads,
        "attention_k_eq_v": config.shared_key_value,
        "final_logit_softcapping": config.logit_cap,
        # A reader's defaults would be those of models that have them.
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
        "use_bidirectional_attention": None,
    }


def _speculators_fields(config: DrafterConfig, record: TargetRecord, layers: dict[str, Any]) -> dict[str, Any]:
    """What speculators reads besides, the layers once more one level down."""
    algorithm = _FORMS[config.kind].algorithm
    speculative = {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": config.gamma,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        # The public id: a local path would mean nothing elsewhere and tell who made this.
        "verifier": {"name_or_path": record.public_id or record.name, "architectures": [record.architecture]},
    }
    return {
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "speculators_config": speculative,
        "transformer_layer_config": layers,
    }
