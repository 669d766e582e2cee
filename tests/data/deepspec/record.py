"""Record what DeepSpec's own code computes on tiny drafters: `python record.py CHECKOUT`.

CHECKOUT is a working tree of github.com/deepseek-ai/DeepSpec at the commit that README.md names; nothing of it is kept
here. Every tensor of a drafter is drawn at random (norms and biases too, so that each shows in the output) and rounded
to float16, in which it is stored; all computation is float32 on a CPU. Written beside this file: one
`<recipe>.safetensors` per recipe with `weights/`, `inputs/` and `outputs/`, its metadata the drafter's `config`.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers import DynamicCache, Qwen3Config
from transformers.integrations import flex_attention as integration

HERE = Path(__file__).parent
SEED, VOCAB, WIDTH, BLOCK, LENGTH, ANCHORS = 20260630, 24, 16, 4, 11, 6
TARGET = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
HEADS = {"markov_rank": 4, "confidence_head_alpha": 1.0, "confidence_head_with_markov": True}
RECIPES: dict[str, dict[str, Any]] = {
    "dspark": {**HEADS, "markov_head_type": "vanilla", "num_draft_layers": 2},
    "dspark-gated": {**HEADS, "markov_head_type": "gated", "num_draft_layers": 1},
    "dspark-rnn": {**HEADS, "markov_head_type": "rnn", "num_draft_layers": 1},
    "dflash": {"markov_rank": 0, "confidence_head_alpha": 0.0, "num_draft_layers": 2},
}
BLOCK_TAPS, EAGLE_TAPS = [1, 4], [0, 1, 2, 4, 6]  # DeepSpec's Eagle3 insists on five


class Arguments(dict[str, Any]):
    """Settings that are read as attributes and asked for with `in`, both of which DeepSpec does."""

    __getattr__ = dict.__getitem__


def main(checkout: str) -> None:
    """Record every recipe."""
    sys.path.insert(0, checkout)
    run_here()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with torch.no_grad():
        for name, settings in RECIPES.items():
            write(name, record_blocks(settings))
        write("eagle3", record_eagle3())
    dist.destroy_process_group()


def run_here() -> None:
    """Let the code run on a CPU and a newer transformers.

    Flex attention is what torch defines, not compiled; Triton's kernels never run; a cache that was cropped to a length
    is now cropped by a negative number of positions.
    """

    def plain(query: Tensor, key: Tensor, value: Tensor, training: bool = False, **options: Any) -> Any:
        return flex_attention(query, key, value, **options)

    integration.compile_friendly_flex_attention = plain
    crop = DynamicCache.crop
    DynamicCache.crop = lambda cache, length: crop(cache, min(0, length - cache.get_seq_length()))
    language = types.ModuleType("triton.language")
    language.constexpr = int  # type: ignore[attr-defined]
    triton = types.ModuleType("triton")
    triton.jit = lambda function: function  # type: ignore[attr-defined]
    triton.language = language  # type: ignore[attr-defined]
    sys.modules |= {"triton": triton, "triton.language": language}
    importlib.import_module("deepspec.modeling.eagle3.loss")
    del sys.modules["triton"], sys.modules["triton.language"]  # torch looks for it too


def randomised(model: Any, seed: int) -> dict[str, Tensor]:
    """Give a drafter random tensors that float16 holds exactly; returns them, in float16."""
    generator = torch.Generator().manual_seed(seed)
    stored = {}
    for name, parameter in model.named_parameters():
        fan = parameter.shape[-1] if parameter.dim() > 1 else 1
        centre, spread = (0.0, fan**-0.5) if parameter.dim() > 1 else (1.0, 0.25)
        if name.endswith(".bias"):
            centre = 0.0
        if name.split(".")[0] in ("embed_tokens", "lm_head"):
            spread = 0.5
        drawn = centre + spread * torch.randn(parameter.shape, generator=generator)
        stored[f"weights/{name}"] = drawn.half()
        parameter.copy_(drawn.half().float())
    return stored


def drawn_inputs(taps: list[int], seed: int) -> dict[str, Tensor]:
    """Two sequences, the second one shorter and padded on the right, with a target's features."""
    generator = torch.Generator().manual_seed(seed)
    lengths, prompts = torch.tensor([LENGTH, LENGTH - 3]), torch.tensor([3, 2])
    steps = torch.arange(LENGTH)
    there = (steps < lengths[:, None]).long()
    shape = (2, LENGTH, len(taps) * WIDTH)
    return {
        "input_ids": torch.randint(2, VOCAB, (2, LENGTH), generator=generator) * there,
        "attention_mask": there,
        "loss_mask": ((steps >= prompts[:, None]).long() * there).float(),
        "target_hidden_states": torch.randn(shape, generator=generator).half().float(),
        "target_last_hidden_states": torch.randn(2, LENGTH, WIDTH, generator=generator).half().float(),
    }


def record_blocks(settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """DSpark and DFlash: one training forward with its losses, two blocks of greedy drafting with a cache between."""
    from deepspec.modeling.dspark.qwen3 import modeling
    from deepspec.modeling.dspark.qwen3.config import build_draft_config

    arguments = Arguments(settings, block_size=BLOCK, mask_token_id=1, target_layer_ids=BLOCK_TAPS, num_anchors=ANCHORS)
    config = build_draft_config(Qwen3Config(**TARGET), arguments)
    model = modeling.Qwen3DSparkModel(config).eval()
    weights = randomised(model, SEED)
    inputs = drawn_inputs(BLOCK_TAPS, SEED + 1)
    outputs: dict[str, Tensor] = {}

    draw = modeling.sample_anchor_positions

    def noting(**options: Any) -> Any:
        outputs["anchors"], outputs["kept"] = found = draw(**options)
        return found

    modeling.sample_anchor_positions = noting
    torch.manual_seed(SEED)
    forward = {name: value for name, value in inputs.items() if name != "attention_mask"}
    result = model(**forward)
    modeling.sample_anchor_positions = draw
    outputs |= {"draft_logits": result.draft_logits, "supervised": result.eval_mask}
    if result.confidence_pred is not None:
        outputs["confidence_logits"] = result.confidence_pred
    outputs |= block_losses(result)
    outputs |= drafted_blocks(model, inputs)
    return tensors(weights, inputs, outputs), config.to_dict()


def block_losses(result: Any) -> dict[str, Tensor]:
    """Each loss alone: one weight 1, the others 0."""
    from deepspec.modeling.dspark.loss import compute_dspark_loss

    alone = {"cross_entropy": (1.0, 0.0, 0.0), "l1": (0.0, 1.0, 0.0), "confidence": (0.0, 0.0, 1.0)}
    found = {}
    for name, (cross_entropy, l1, confidence) in alone.items():
        found[f"loss/{name}"] = compute_dspark_loss(
            outputs=result,
            loss_decay_gamma=4.0,
            ce_loss_alpha=cross_entropy,
            l1_loss_alpha=l1,
            confidence_head_alpha=confidence,
        )
    return found


def drafted_blocks(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two blocks after 4 and then 7 positions of the first sequence, as DeepSpec's evaluator drafts them greedily."""
    from deepspec.eval.dspark.draft_ops import build_dspark_proposal, forward_dspark_draft_block

    model.config._attn_implementation = "sdpa"
    ids, features = inputs["input_ids"][:1], inputs["target_hidden_states"][:1]
    cache, known, blocks = DynamicCache(), 0, []
    logits: list[Tensor] = []
    correct = model.sample_draft_tokens

    def noting(*values: Any, **options: Any) -> Any:
        found = correct(*values, **options)
        logits.append(found[1])
        return found

    model.sample_draft_tokens = noting
    for start in (4, 7):
        block = torch.full((1, BLOCK), int(model.mask_token_id))
        block[:, 0] = ids[:, start]
        hidden = forward_dspark_draft_block(
            model,
            draft_input_ids=block,
            position_ids=torch.arange(LENGTH + BLOCK)[None],
            past_key_values_draft=cache,
            target_hidden_states=features[:, known:start],
            start=start,
            block_size=BLOCK,
        )
        blocks.append(
            build_dspark_proposal(
                model,
                draft_input_ids=block,
                block_hidden=hidden,
                block_size=BLOCK,
                temperature=0.0,
                confidence_threshold=0.0,
            )
        )
        known = start
    found = {
        "decoding/logits": torch.cat(logits),
        "decoding/tokens": torch.cat([block.verify_input_ids[:, 1:] for block in blocks]),
    }
    if blocks[0].confidence_logits is not None:
        found["decoding/confidence_logits"] = torch.cat([block.confidence_logits for block in blocks])
    return found


def record_eagle3() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Eagle3: the steps of training-time test with their losses, two chains of greedy drafting with a cache between."""
    from deepspec.modeling.eagle3 import loss
    from deepspec.modeling.eagle3.qwen3 import Qwen3Eagle3Model
    from deepspec.modeling.eagle3.qwen3.config import build_draft_config
    from deepspec.utils import metrics

    arguments = Arguments(
        target_layer_ids=EAGLE_TAPS,
        ttt_length=BLOCK,
        step_loss_decay=0.8,
        draft_num_hidden_layers=1,
        target_model_name_or_path="tiny",
    )
    config = build_draft_config(target_config=Qwen3Config(**TARGET), model_args=arguments)
    model = Qwen3Eagle3Model(config).eval()
    weights = randomised(model, SEED + 2)
    inputs = drawn_inputs(EAGLE_TAPS, SEED + 3)
    logits: list[Tensor] = []

    def noting(**options: Any) -> Any:
        found = model(**options)
        if not options.get("target_logits_only"):
            logits.append(found.draft_logits.clone())
        return found

    steps: list[Tensor] = []
    masks: list[Tensor] = []

    class PlainLoss:
        """What the Triton kernel computes, by its own description; it needs a GPU."""

        @staticmethod
        def apply(draft: Tensor, target: Tensor, mask: Tensor, normalizer: float) -> Tensor:
            rows = -(target * torch.log_softmax(draft.float(), -1)).sum(-1)
            masks.append(mask.squeeze(-1) > 0)
            steps.append((rows * mask.squeeze(-1)).sum() / normalizer)
            return steps[-1]

    loss.FusedLogSoftmaxLoss = PlainLoss
    metrics.reset()  # of the recipes before
    total = loss.compute_eagle3_loss(model=noting, batch=inputs, ttt_length=BLOCK, step_loss_decay=0.8)
    outputs = {
        "draft_logits": torch.stack(logits, 2),  # [B, S, steps, V]
        "supervised": torch.stack(masks, 2),
        "loss/steps": torch.stack(steps),
        "loss/total": total,
    }
    outputs |= drafted_chains(model, inputs)
    return tensors(weights, inputs, outputs), config.to_dict()


def drafted_chains(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two chains after 4 and then 7 positions of the first sequence, as DeepSpec's evaluator drafts them greedily."""
    from deepspec.eval.eagle3.evaluator import Qwen3Eagle3Evaluator

    model.config._attn_implementation = "sdpa"
    ids, features = inputs["input_ids"][:1], inputs["target_hidden_states"][:1]

    def target_output(start: int, end: int) -> SimpleNamespace:
        layers = [torch.zeros(1, end - start, WIDTH)] * 9
        for number, tap in enumerate(EAGLE_TAPS):
            layers[tap + 1] = features[:, start:end, number * WIDTH : (number + 1) * WIDTH]
        return SimpleNamespace(hidden_states=layers)

    logits: list[Tensor] = []
    head = model.compute_logits

    def noting(hidden: Tensor) -> Tensor:
        logits.append(head(hidden))
        return logits[-1]

    model.compute_logits = noting
    evaluator = SimpleNamespace(draft_model=model, args=SimpleNamespace(temperature=0.0), max_proposal_tokens=BLOCK)
    positions = torch.arange(LENGTH + BLOCK)[None]
    context = Qwen3Eagle3Evaluator._init_context(
        evaluator, initial_output=target_output(0, 4), output_ids=ids, position_ids=positions, num_input_tokens=4
    )
    tokens = []
    for start in (4, 7):
        proposal = Qwen3Eagle3Evaluator._propose(
            evaluator, context=context, output_ids=ids, position_ids=positions, start=start
        )
        tokens.append(proposal.verify_input_ids[:, 1:])
        if start == 4:  # two drafts are accepted and one token follows: positions 4 .. 6 join the context
            verified = SimpleNamespace(committed_tokens=ids[:, 5:8], target_output=target_output(4, 4 + 1 + BLOCK))
            Qwen3Eagle3Evaluator._update(evaluator, context, verified)
    return {
        "decoding/logits": torch.cat(logits, 1).view(2, BLOCK, VOCAB),
        "decoding/tokens": torch.cat(tokens),
    }


def tensors(*parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """All that is stored, by name."""
    weights, inputs, outputs = parts
    named = {**weights, **{f"inputs/{name}": value for name, value in inputs.items()}}
    for name, value in named.items():
        if name.startswith("inputs/target_"):
            named[name] = value.half()
        elif name.startswith("inputs/"):
            named[name] = value.to(torch.uint8)
    named |= {f"outputs/{name}": value for name, value in outputs.items()}
    return {name: value.detach().contiguous().clone() for name, value in named.items()}


def write(name: str, recorded: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    """One recipe's file."""
    stored, config = recorded
    path = HERE / f"{name}.safetensors"
    save_file(stored, path, metadata={"config": json.dumps(config, sort_keys=True, default=str)})
    print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
