"""Loads drafters with the released vLLM as its draft worker does, up to weights and heads; a process of its own.

Called with the target's folder and with folders that hold `drafter/` and `engines/vllm/speculative_config.json`, as a
package does, and, for the heads, `inputs.safetensors`: hidden states [N, d], previous tokens [N], the target's `head`
[V, d]. Writes `loaded.safetensors` and `outputs.safetensors` there and prints, by folder, what vLLM made of the files,
or the stage that refused them and why.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import placeholders
import torch
from safetensors.torch import load_file, save_file

placeholders.put_in_place_of(
    [
        # How requests come in and answers go out; needs a dozen packages that no reader of files does.
        *("vllm.entrypoints", "vllm.multimodal.audio", "vllm.multimodal.video", "vllm.parser", "vllm.renderers"),
        *("vllm.tool_parsers", "vllm.v1.structured_output"),
        *("cbor2", "cpuinfo", "einops", "prometheus_client", "pybase64", "uvloop", "zmq"),
    ]
)

from vllm.config import (  # noqa: E402
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.model_executor.models.llama import LlamaForCausalLM  # noqa: E402
from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal  # noqa: E402
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM  # noqa: E402
from vllm.model_executor.models.registry import ModelRegistry  # noqa: E402
from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id  # noqa: E402

OWN = ("has_own_embed_tokens", "has_own_lm_head")  # what decides whether the target's matrices are shared


def settings(folder: Path, target: ModelConfig) -> SpeculativeConfig:
    """As EngineArgs makes it from `--speculative-config`, from the folder that launch.sh changes to."""
    os.chdir(folder / "engines" / "vllm")
    given = json.loads(Path("speculative_config.json").read_text())
    return SpeculativeConfig(**given, target_model_config=target, target_parallel_config=ParallelConfig())


def described(config: SpeculativeConfig, folder: Path) -> dict[str, Any]:
    draft = config.draft_model_config.hf_config
    other = SpeculatorsConfig.from_pretrained(folder / "drafter")  # the path of checkpoints without `model_type`
    keys = ("block_size", "markov_rank", "enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor")
    return {
        "method": config.method,
        "num_speculative_tokens": config.num_speculative_tokens,
        "architectures": list(config.draft_model_config.architectures),
        "layer_inputs": list(get_eagle3_aux_layers_from_config(config)),
        "mask_token_id": get_parallel_drafting_token_id(draft),
        "non_causal": dflash_has_any_non_causal(draft),
        "rope_theta": draft.rope_parameters["rope_theta"],
        **{key: getattr(draft, key) for key in keys},
        "speculators_path": {key: getattr(other, key) for key in (*keys, "mask_token_id", "target_layer_ids")},
    }


def model_of(config: SpeculativeConfig, target: ModelConfig, weights: dict[str, torch.Tensor]) -> Any:
    whole = VllmConfig(model_config=target, device_config=DeviceConfig("cpu"))
    # Set afterwards: checked together, they are refused without Triton, which has no backend for a CPU.
    whole.speculative_config = config
    with set_current_vllm_config(whole):
        if not torch.distributed.is_initialized():
            place = f"file://{tempfile.mkdtemp()}/rendezvous"
            init_distributed_environment(1, 0, place, 0, backend="gloo")
            initialize_model_parallel()
        torch.set_default_dtype(target.dtype)
        # All layers of all cases would otherwise have one name in one registry.
        whole.compilation_config.static_forward_context.clear()
        try:
            model = Qwen3DSparkForCausalLM(vllm_config=whole)
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan if parameter.is_floating_point() else -1)  # what is not loaded shall show
    model.load_weights(weights.items())
    return model


@torch.no_grad()
def heads(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Draft logits and confidences of hidden states, on the target's head, which vLLM shares with the drafter."""
    model.lm_head.weight.copy_(inputs["head"])
    confidence = getattr(model.model, "confidence_head", None)
    layers = [model.lm_head, model.model.markov_head.markov_w2, *([] if confidence is None else [confidence.proj])]
    for layer in layers:
        # vLLM's own fallback; its other choices are compiled parts, and depend on the processor.
        layer.cpu_linear = torch.nn.functional.linear
    embedded = model.markov_embed(inputs["previous"])
    found = {"logits": model.compute_draft_logits(inputs["hidden"]) + model.markov_bias(embedded)}
    if confidence is not None:
        found["confidences"] = model.compute_confidence(inputs["hidden"], embedded).contiguous()
    return found


def read(folder: Path, target: ModelConfig) -> dict[str, Any]:
    stage = "settings"
    try:
        config = settings(folder, target)
        answer = described(config, folder)
        stage = "weights"
        model = model_of(config, target, load_file(folder / "drafter" / "model.safetensors"))
        answer |= {name: bool(getattr(model, name, False)) for name in OWN}
        loaded = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
        save_file(loaded, folder / "loaded.safetensors")
        if (folder / "inputs.safetensors").is_file():
            stage = "heads"
            save_file(heads(model, load_file(folder / "inputs.safetensors")), folder / "outputs.safetensors")
    except Exception as reason:
        return {"refused_at": stage, "error": f"{type(reason).__name__}: {reason}"}
    return answer


def main(target: Path, folders: list[Path]) -> None:
    # Known models are looked at in a process that would have none of the placeholders; these are the same classes.
    ModelRegistry.register_model("Qwen3DSparkModel", Qwen3DSparkForCausalLM)
    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
    served = ModelConfig(model=str(target), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True)
    answers = {folder.name: read(folder, served) for folder in folders}
    print(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name).resolve() for name in sys.argv[2:]])
