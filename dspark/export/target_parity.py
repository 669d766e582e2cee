"""Does an exported target say what the target says? Logits, features and greedy tokens, on real prompts.

The graph is run as a decoder runs it: the prompt first, then a few tokens at a time behind what was kept, each time
with a token at the end that is thrown away like a rejected draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dspark.decoding.loop import decode
from dspark.engines.onnx_target_io import TargetComparison
from dspark.export.report import LOGIT_TOLERANCE, TIE
from dspark.io.progress import Progress
from dspark.targets.loading import Target

FEATURE_TOLERANCE = 1e-4  # of the largest feature of the position
_STEP = 4  # tokens kept of each pass behind the prompt

Floats = NDArray[np.float32]
Arrays = tuple[Any, ...]
Run = Callable[..., Arrays]


class Geometry(NamedTuple):
    """Of a target's keys and values."""

    layers: int
    heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> Geometry:
        """From a transformers config."""
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, width)

    def nothing(self) -> Floats:
        """Keys or values of no position, for one row."""
        return np.zeros((self.layers, 1, self.heads, 0, self.head_dim), np.float32)


def compare_target(
    target: Target,
    geometry: Geometry,
    run: Run,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    progress: Progress | None = None,
) -> TargetComparison:
    """Compare a graph with the target, prompt by prompt, each with what torch answers to it.

    Args:
        target: in float32.
        run: the graph, from token ids, past keys, past values and past length to logits, features, new keys and new
            values, all numpy arrays.
        prompts: token ids.
        new_tokens: of each answer.
        progress: advanced after each prompt; the caller starts the task.
    """
    progress = progress or Progress()
    logit_difference = feature_difference = 0.0
    positions = tokens = differing = ties = 0
    first = None
    for number, prompt in enumerate(prompts):
        answer = decode(target, None, [prompt], max_new_tokens=new_tokens)[0].token_ids
        ids = [*prompt, *answer[:-1]]
        taps, last_hidden = target.hidden(torch.tensor([ids], device=target.device))
        expected, features = target.logits(last_hidden)[0].cpu().numpy(), taps[0].cpu().numpy()
        found_logits, found_features = _replay(run, geometry, ids, len(prompt), target.mask_token_id)
        logit_difference = max(logit_difference, _largest(np.abs(found_logits - expected)))
        scale = np.abs(features).max(-1, keepdims=True)
        feature_difference = max(feature_difference, _largest(np.abs(found_features - features) / scale))
        said = found_logits[len(prompt) - 1 :].argmax(-1).tolist()
        for slot, (mine, theirs) in enumerate(zip(said, answer, strict=True)):
            row = expected[len(prompt) - 1 + slot]
            if mine != theirs and row[theirs] - row[mine] < TIE:
                ties += 1
            elif mine != theirs:
                differing += 1
                first = first or f"prompt {number}, token {slot + 1}: {mine} instead of {theirs}"
        positions, tokens = positions + len(ids), tokens + len(answer)
        progress.advance()
    equal = not differing and logit_difference <= LOGIT_TOLERANCE and feature_difference <= FEATURE_TOLERANCE
    return TargetComparison(
        prompts=len(prompts),
        positions=positions,
        max_logit_difference=logit_difference,
        logit_tolerance=LOGIT_TOLERANCE,
        max_feature_difference=feature_difference,
        feature_tolerance=FEATURE_TOLERANCE,
        greedy_tokens=tokens,
        differing_tokens=differing,
        near_ties=ties,
        tie_margin=TIE,
        verdict="equal" if equal else "different",
        first_difference=first,
    )


def _replay(run: Run, geometry: Geometry, ids: Sequence[int], prompt: int, rejected: int) -> tuple[Floats, Floats]:
    """Logits [S, V] and features [S, m*d] of a sequence that arrives as in decoding.

    Args:
        prompt: how many tokens come first, at once.
        rejected: a token to throw away at the end of each pass.
    """
    keys = values = geometry.nothing()
    logits: list[Floats] = []
    features: list[Floats] = []
    ends = [prompt, *range(prompt + _STEP, len(ids), _STEP), len(ids)]
    for start, end in zip([0, *ends], ends, strict=False):
        if start == end:
            continue
        tokens = np.array([[*ids[start:end], rejected]], np.int64)
        kept = end - start
        now, tapped, new_keys, new_values = run(tokens, keys, values, np.array([start], np.int64))
        logits.append(now[0, :kept])
        features.append(tapped[0, :kept])
        keys = np.concatenate([keys, new_keys[:, :, :, :kept]], 3)
        values = np.concatenate([values, new_values[:, :, :, :kept]], 3)
    return np.concatenate(logits), np.concatenate(features)


def _largest(values: Floats) -> float:
    largest = float(values.max(initial=0.0))
    return largest if np.isfinite(largest) else float(np.finfo(np.float32).max)
