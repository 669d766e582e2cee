"""How large a drafter is, from its target's shape and its recipe alone. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.config.models import DrafterSettings
from dspark.targets.shape import TargetShape

Matrix = tuple[int, int]


@dataclass(frozen=True)
class DrafterSize:
    """A drafter's sizes.

    Attributes:
        backbone: shapes of the matrices outside the heads: those that decay, and that Muon moves where it is used.
        others: parameters in norms, biases and heads.
        layers: draft layers.
        heads, kv_heads, head_dim, intermediate_size: of each.
        rank: of the sequential head, 0 without one.
        proposed: tokens that may be proposed, Vd.
        context_products: multiplications of weights with the features of one context token.
        slot_products: the same with the states of one slot of a block, without LM head and sequential head.
    """

    backbone: tuple[Matrix, ...]
    others: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rank: int
    proposed: int
    context_products: int
    slot_products: int

    @property
    def parameters(self) -> int:
        """What is trained."""
        return sum(rows * columns for rows, columns in self.backbone) + self.others


def drafter_size(target: TargetShape, taps: int, settings: DrafterSettings) -> DrafterSize:
    """The drafter that a recipe asks for on a target.

    Its layers are the target's layers of full attention with a dense network (deepspec.md, sections 1.2, 1.3 and 1.5).

    Args:
        taps: how many layers of the target feed it, m.
    """
    layer = next(layer for layer in reversed(target.layers) if layer.full)
    d, inner, r = target.hidden_size, target.intermediate_size, settings.markov.rank
    heads, kv, width = layer.heads, layer.kv_heads, layer.head_dim
    gemma = target.model_type.startswith("gemma4")
    chained = settings.kind == "eagle3"
    fed = 2 * d if chained else d  # EAGLE-3's attention reads a token's embedding beside the state
    keys: list[Matrix] = [(kv * width, fed)] * (2 if layer.values else 1)
    own: list[Matrix] = [(heads * width, fed), (d, heads * width), (inner, d), (inner, d), (d, inner)]
    norms = (4 if gemma else 3 if chained else 2) * d + 2 * width
    biases = heads * width + 2 * kv * width + d if target.attention_bias == "all" else 0
    projection: Matrix = (d, taps * d)
    limited = settings.draft_vocab_size
    proposed = limited if limited is not None and limited < target.vocab_size else target.vocab_size
    ends = d if chained else 2 * d  # norms of the output and, of blocks, of the projected context
    return DrafterSize(
        backbone=(projection, *([*keys, *own] * settings.layers)),
        others=ends + settings.layers * (norms + biases) + _heads(target, settings, proposed),
        layers=settings.layers,
        heads=heads,
        kv_heads=kv,
        head_dim=width,
        intermediate_size=inner,
        rank=r,
        proposed=proposed,
        context_products=_count(projection) + settings.layers * sum(map(_count, keys)),
        slot_products=settings.layers * sum(map(_count, [*keys, *own])),
    )


def _heads(target: TargetShape, settings: DrafterSettings, proposed: int) -> int:
    """Parameters of the sequential head and the confidence head (deepspec.md, section 1.2)."""
    d, r = target.hidden_size, settings.markov.rank
    markov = (target.vocab_size + proposed) * r
    inner = {"gated": (d + r) * r + r, "rnn": (2 * r + d) * 3 * r + 3 * r}.get(settings.markov.type, 0)
    return markov + inner + (d + r + 1 if settings.confidence else 0)


def _count(matrix: Matrix) -> int:
    return matrix[0] * matrix[1]
