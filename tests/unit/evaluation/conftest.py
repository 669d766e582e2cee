from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # wrong_rules.py


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors on many threads spend their time waiting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
