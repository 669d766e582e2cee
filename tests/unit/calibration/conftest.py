from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dspark.calibration import Records

CASES = Path(__file__).parents[2] / "data" / "calibration"


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.fixture
def calibration_case():
    """Reads a case of tests/data/calibration: each row is its own conversation."""

    def read(name: str, **changes) -> Records:
        case = json.loads((CASES / f"{name}.json").read_text())
        return Records(case["logits"], case["prefix_mask"], **changes)

    return read


@pytest.fixture(scope="session")
def simulate():
    """Blocks whose true acceptance odds are known.

    A draft with true log-odds u is accepted with probability sigmoid(u); the head states `stated(u)`. Conversations
    share an effect of standard deviation .5, so that their blocks resemble each other.
    """

    def make(
        seed,
        stated=lambda u: u,
        *,
        conversations=100,
        blocks=40,
        means=(1.2, 0.9, 0.7, 0.6),
        conversation_effect=0.5,
        **changes,
    ) -> Records:
        generator = np.random.default_rng(seed)
        rows = conversations * blocks
        shared = np.repeat(generator.normal(0, conversation_effect, (conversations, 1)), blocks, axis=0)
        u = generator.normal(means, 1.3, (rows, len(means))) + shared
        accepted = np.logical_and.accumulate(generator.random(u.shape) < sigmoid(u), axis=1)
        return Records(stated(u), accepted, conversation=np.repeat(np.arange(conversations), blocks), **changes)

    return make
