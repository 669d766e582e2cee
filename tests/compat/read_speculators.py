"""Loads drafters with the released speculators and runs their training forward; a process of its own.

Called with folders that hold `drafter/` and, unless the drafter is only to be loaded, `inputs.safetensors`: the taps of
a sequence [S, m*d], its tokens [S], and anchors [N]. Writes `loaded.safetensors` and `outputs.safetensors` there and
prints, by folder, what the config became, or the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import placeholders
import torch
from safetensors.torch import load_file, save_file

placeholders.put_in_place_of(["datasets", "httpx", "openai"])  # they make and read training data

import speculators.models.dspark.core as core  # noqa: E402
from speculators import SpeculatorModel, SpeculatorModelConfig  # noqa: E402
from speculators.losses import resolve_loss_config  # noqa: E402

FIELDS = ("block_size", "mask_token_id", "markov_rank", "markov_head_type", "sample_from_anchor", "draft_vocab_size")
STEPS = 4  # of a chain


def read(folder: Path) -> dict[str, Any]:
    config = SpeculatorModelConfig.from_pretrained(folder / "drafter")
    # Its own choice, flex attention, is compiled; this is the same attention in plain torch.
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder / "drafter", config=config).eval()
    loaded = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
    save_file(loaded, folder / "loaded.safetensors")
    if (folder / "inputs.safetensors").is_file():
        run = chains if config.speculators_model_type == "eagle3" else forward
        save_file(run(model, load_file(folder / "inputs.safetensors")), folder / "outputs.safetensors")
    return {
        "class": type(model).__name__,
        "aux_hidden_state_layer_ids": model.target_layer_ids,
        "speculative_tokens": config.speculators_config.proposal_methods[0].speculative_tokens,
        **{name: getattr(config, name) for name in FIELDS if hasattr(config, name)},
    }


def forward(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Draft logits [N, K, V] and confidence logits [N, K] of the blocks at the anchors, teacher-forced.

    The forward returns a loss; its logits are seen where it hands them to its own metrics.
    """
    seen: dict[str, torch.Tensor] = {}
    metrics = core.compute_metrics

    def spy(logits: torch.Tensor, targets: torch.Tensor, confidences: torch.Tensor, *rest: Any, **options: Any) -> Any:
        seen.update(logits=logits, confidences=confidences)
        return metrics(logits, targets, confidences, *rest, **options)

    taps, tokens, anchors = inputs["taps"], inputs["tokens"], inputs["anchors"]
    loss_mask = torch.zeros(1, len(tokens))
    loss_mask[0, anchors] = 1
    eager = resolve_loss_config("kl_div", "eager")  # the others need Triton
    core.compute_metrics = spy
    try:
        with torch.no_grad():
            model(
                hidden_states=taps.unsqueeze(0),
                input_ids=tokens.unsqueeze(0),
                loss_mask=loss_mask,
                verifier_last_hidden_states=torch.zeros(1, len(tokens), model.norm.weight.shape[0]),
                document_ids=torch.zeros(1, len(tokens), dtype=torch.int64),
                loss_config=eager,
                tv_loss_fn=resolve_loss_config("tv", "eager")["tv"][0],
                max_anchors=len(anchors),
            )
    finally:
        core.compute_metrics = metrics
    blocks = (len(anchors), model.block_size)
    return {
        "logits": seen["logits"].reshape(*blocks, -1).contiguous(),
        "confidences": seen["confidences"].reshape(blocks).contiguous(),
    }


def chains(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Draft logits [S, steps, V] of the chains from every position, teacher-forced, as its training runs them.

    What stands at a position is its hidden states and the token after it; the last one has none, and gets 0. This class
    does not put in a head that the checkpoint leaves to the target, though it has read it for its loss.
    """
    model.lm_head.weight.data.copy_(model.verifier_lm_head.weight)
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, given, logits: seen.append(logits[0]))
    taps, tokens = inputs["taps"], inputs["tokens"]
    following = torch.cat([tokens[1:], tokens.new_zeros(1)])
    documents = torch.zeros(1, len(tokens), dtype=torch.int64)
    with torch.no_grad():
        model(taps.unsqueeze(0), following.unsqueeze(0), documents, ttt_steps=STEPS)
    hook.remove()
    return {"logits": torch.stack(seen, 1).contiguous()}


def main(folders: list[Path]) -> None:
    answers = {}
    for folder in folders:
        try:
            answers[folder.name] = read(folder)
        except Exception as reason:
            answers[folder.name] = {"error": f"{type(reason).__name__}: {reason}"}
    print(json.dumps(answers))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
