"""Targets that were never published as GGUF: written when they are needed."""

from __future__ import annotations

import pytest

from dspark.io.gguffile import read_gguf
from dspark.targets.served import described_file, published_file, served_file


@pytest.fixture(params=["llama", "qwen3"])
def target(request, family):
    """Of the families that are written as GGUF."""
    return family(request.param)


def test_a_target_from_elsewhere_is_served_in_half_precision_and_described_without_being_written(target, workspace):
    record = target.record
    assert published_file(record, workspace) is None
    described = described_file(record, workspace)
    assert not (workspace / ".dspark/store/gguf" / record.digest).exists()
    written = read_gguf(served_file(record, workspace))
    assert set(written.types.values()) == {"F16", "F32"}
    assert written.path.name == "F16.gguf"
    exact = read_gguf(served_file(record, workspace, precision="F32"))
    assert (described.shapes, described.types) == (exact.shapes, exact.types)
    assert described.keys.keys() == exact.keys.keys()
    for name, key in described.keys.items():  # numbers are stored in float32
        assert exact.keys[name].kind == key.kind
        assert exact.keys[name].value == (pytest.approx(key.value) if key.kind == "FLOAT32" else key.value)
