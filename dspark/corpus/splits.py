"""Which prompt belongs to which split.

The unit of splitting is the template, for prompts made from one, or else the first user turn: neither a template nor
a conversation with its own beginnings is ever divided. A unit's place is a hash of its name alone, so it stays where
it is whatever prompts are added or taken away.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from dspark.config.models import SplitShares
from dspark.corpus.prompts import Prompt

SPLITS = ("train", "dev", "calibration", "eval")


def split_unit(prompt: Prompt) -> str:
    """Name of what is split as a whole: `template:<domain>/<template>` or `root:<first user turn, case folded>`."""
    if prompt.template is not None:
        return f"template:{prompt.domain}/{prompt.template}"
    return f"root:{prompt.root.casefold()}"


def hash_position(name: str, seed: int) -> float:
    """A place in [0, 1) that depends on nothing but `name` and `seed`."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53  # 53 bits, so that it stays below 1


def assign_split(prompt: Prompt, shares: SplitShares, seed: int = 0) -> str:
    """The split of a prompt: its unit's place on [0, 1) cut into the shares, in the order of `SPLITS`."""
    position = hash_position(split_unit(prompt), seed)
    bound = 0.0
    for split in SPLITS[:-1]:
        bound += getattr(shares, split)
        if position < bound:
            return split
    return SPLITS[-1]


def order_key(prompt: Prompt, seed: int = 0) -> tuple[float, str]:
    """Order of the prompts within a split: by hash, so that the first n are a fair sample of any n."""
    return hash_position(f"order:{prompt.id}", seed), prompt.id


def apportion(total: int, counts: Sequence[int]) -> list[int]:
    """Divide `total` among groups in proportion to their counts (largest remainders), none above its count.

    A group that is not empty gets at least one as long as `total` reaches, the first groups before the last.
    """
    available = sum(counts)
    if total >= available:
        return list(counts)
    exact = [total * count / available for count in counts]
    quotas = [int(value) for value in exact]
    by_remainder = sorted(range(len(counts)), key=lambda index: (quotas[index] - exact[index], index))
    for index in by_remainder[: total - sum(quotas)]:
        quotas[index] += 1
    for index, count in enumerate(counts):
        if count and not quotas[index]:
            donor = max(range(len(counts)), key=lambda other: quotas[other])
            if quotas[donor] > 1:
                quotas[donor] -= 1
                quotas[index] = 1
    return quotas


def likely_units(shares: Sequence[float], chance: float = 0.99) -> int:
    """How many units it takes until a split of each share has at least one, each with this chance.

    A unit misses a split of share s with probability 1 - s, all n of them with (1 - s)^n.
    """
    return max(math.ceil(math.log(1 - chance) / math.log(1 - share)) for share in shares)
