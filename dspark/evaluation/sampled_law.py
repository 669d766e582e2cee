"""Sampled texts against the law that they should have, on any model: a chi-square over all tokens of all texts.

A draft must not change how probable a token is. Each emitted token is placed where it falls among what the target might
have said there, the likeliest first: at the mass of all likelier tokens, and at random within its own. If every token
is drawn from the target's distribution given those before it, these places are uniform and independent, whatever was
accepted, cut or rolled back on the way, and texts may end as they like. Wrong rules favour what the drafter favours,
and so other ranks of the target than chance. A token that the truncation leaves no probability has no place at all: one
of them is proof enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.decoding.acceptance import distribution
from dspark.decoding.records import Decoded
from dspark.decoding.truncation import Truncation
from dspark.errors import SettingsError
from dspark.targets.loading import Target

CELLS = 16
FALSE_ALARM = 1e-3
_PER_CELL = 5  # tokens, on average: of fewer the statistic is not distributed as chi-squared
_NOWHERE = 1.0  # the place of a token that cannot be said
_CLEAR = (
    1e-3  # how far outside a truncation a token must lie, relative to where it cuts, for rounding not to explain it
)
_TOGETHER = 64  # texts in one pass


@dataclass(frozen=True)
class ChiSquare:
    """Counts in cells that are equally probable if texts are drawn as they should be.

    Attributes:
        tokens: that were counted.
        impossible: further ones that the target cannot have said there, under the truncation.
    """

    tokens: int
    cells: int
    statistic: float
    impossible: int = 0

    @classmethod
    def of(cls, places: NDArray[np.float64], cells: int = CELLS) -> ChiSquare:
        """Of places in [0, 1); 1 for a token that cannot be said.

        Raises:
            SettingsError: too few tokens for so many cells, none among them that alone would tell.
        """
        possible = places[places < _NOWHERE]
        impossible = places.size - possible.size
        if possible.size < _PER_CELL * cells:
            if not impossible:
                raise SettingsError(
                    f"{places.size} tokens are too few for {cells} cells, at least {_PER_CELL * cells} are needed",
                    "sample more or longer texts",
                )
            return cls(possible.size, cells, 0.0, impossible)
        counts = np.bincount((possible * cells).astype(np.intp), minlength=cells)
        expected = possible.size / cells
        return cls(possible.size, cells, float(((counts - expected) ** 2).sum() / expected), impossible)

    @property
    def p_value(self) -> float:
        """How often chance alone is as far off: the upper tail of chi-squared with cells - 1 degrees of freedom.

        0 if something was said that cannot be.
        """
        return 0.0 if self.impossible else float(_upper_tail(torch.tensor(self.cells - 1.0), self.statistic))

    def rejects(self, false_alarm: float = FALSE_ALARM) -> bool:
        """Whether the texts were not drawn from the target, which is said of right ones that often."""
        return self.p_value < false_alarm

    def power(self, false_alarm: float = FALSE_ALARM) -> float:
        """How often as many tokens of a law as far off as this one seems to be would be rejected by their cells.

        The statistic of a wrong law is noncentral chi-squared, a Poisson mixture of central ones; its noncentrality is
        estimated as what the statistic exceeds its degrees of freedom by.
        """
        freedom = self.cells - 1.0
        half = max(self.statistic - freedom, 0.0) / 2
        more = torch.arange(half + 10 * half**0.5 + 50, dtype=torch.float64)
        mean = torch.tensor(half, dtype=torch.float64)
        weights = torch.exp(torch.special.xlogy(more, mean) - half - torch.lgamma(more + 1))
        tails = _upper_tail(freedom + 2 * more, critical_value(self.cells, false_alarm))
        return float((weights * tails).sum())


def critical_value(cells: int, false_alarm: float = FALSE_ALARM) -> float:
    """The statistic that chance alone exceeds that often."""
    low, high = 0.0, 1e4
    for _ in range(100):  # halved until the two are one number
        middle = (low + high) / 2
        if float(_upper_tail(torch.tensor(cells - 1.0), middle)) > false_alarm:
            low = middle
        else:
            high = middle
    return high


def _upper_tail(freedom: Tensor, statistic: float) -> Tensor:
    """Of chi-squared, elementwise over degrees of freedom."""
    halves = freedom.double() / 2
    tail: Tensor = torch.special.gammaincc(halves, torch.full_like(halves, statistic / 2))
    return tail


@torch.inference_mode()
def places(
    target: Target, prompts: Sequence[Sequence[int]], decoded: Sequence[Decoded], *, seed: int = 0
) -> list[NDArray[np.float64]]:
    """Where the tokens of each text stand among what the target might have said, in [0, 1); 1: nowhere.

    Args:
        target: that the texts are to be drawn from; in float32 or better, since each is scored in one pass without a
            cache, and rounding must not look like a wrong rule.
        prompts: token ids of each prompt.
        decoded: what was sampled after each, at its own temperature and truncation.
        seed: of the places within a token's own mass.
    Returns:
        [tokens] of each text.
    Raises:
        SettingsError: text that was not sampled, which has no law, or a target in half precision.
    """
    if target.dtype not in (torch.float32, torch.float64):
        raise SettingsError(f"sampled texts are checked in float32, the target is in {target.dtype}")
    if any(one.temperature == 0 for one in decoded):
        raise SettingsError("the law of sampled texts is checked on text decoded at a temperature above 0")
    chance = np.random.default_rng(seed)
    found = []
    for first in range(0, len(decoded), _TOGETHER):
        texts = decoded[first : first + _TOGETHER]
        rows = [[*prompt, *one.token_ids[:-1]] for prompt, one in zip(prompts[first:], texts, strict=False)]
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        # Nothing sees what comes after it, so padding on the right changes nothing.
        last_hidden = target.last_hidden(ids.to(target.device))
        for hidden, read, one in zip(last_hidden, map(len, rows), texts, strict=True):
            views = hidden[read - len(one.token_ids) : read]
            found.append(_places(target.logits(views), one, chance))
    return found


def _places(logits: Tensor, one: Decoded, chance: np.random.Generator) -> NDArray[np.float64]:
    """Of one text, from the target's logits before each of its tokens, [tokens, V]."""
    truncation = Truncation(one.top_k, one.top_p)
    whole = distribution(logits, one.temperature, torch.float64)
    probs = truncation.of(whole)
    said = torch.tensor(one.token_ids, device=probs.device)[:, None]
    own = probs.gather(1, said)
    numbers = torch.arange(probs.shape[1], device=probs.device)
    likelier = (probs > own) | ((probs == own) & (numbers < said))
    start = (probs * likelier).sum(1).cpu().numpy()
    place = start + own[:, 0].cpu().numpy() * chance.random(len(start))
    return np.where(_outside(whole, said, truncation).cpu().numpy(), _NOWHERE, np.clip(place, 0, np.nextafter(1, 0)))


def _outside(probs: Tensor, said: Tensor, truncation: Truncation) -> Tensor:
    """Which tokens no rounding puts inside the truncation, [tokens].

    Args:
        probs: of the target, not cut, [tokens, V].
        said: [tokens, 1].
    """
    own = probs.gather(1, said)
    likelier = probs > own * (1 + _CLEAR)
    outside = own[:, 0] == 0
    if truncation.top_k:
        outside |= likelier.sum(1) >= truncation.top_k
    if truncation.top_p < 1:
        most = min(truncation.top_k or probs.shape[1], probs.shape[1])
        held = probs.topk(most, 1).values.sum(1)
        outside |= (probs * likelier).sum(1) >= truncation.top_p * (1 + _CLEAR) * held
    return outside
