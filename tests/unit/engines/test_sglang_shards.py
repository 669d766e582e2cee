"""Shards as SGLang 0.5.23 writes them: `torch.save({"logits": ..., "prefix_mask": ...}, "<stem>.<n>.pt")`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.calibration import fit_temperatures
from dspark.config.models import CalibrationSettings
from dspark.engines.sglang_shards import read_shards, shard_digests, shard_files
from dspark.errors import CalibrationError, DataError

GAMMA = 3


def collect(folder: Path, shards: int, rows: int = 100, sharpness: float = 1.0) -> None:
    """What a server leaves whose drafts are accepted with the sigmoid of logits that it states too sharply."""
    random = np.random.default_rng(2)
    for number in range(shards):
        logits = random.normal(0.8, 1.2, (rows, GAMMA))
        right = random.random((rows, GAMMA)) < 1 / (1 + np.exp(-logits))
        counts = np.where(right.all(1), GAMMA, right.argmin(1))
        save(folder / f"run.{number}.pt", sharpness * logits, np.arange(GAMMA) < counts[:, None])


def save(path: Path, logits: Any, mask: Any) -> None:
    tensors = {"logits": torch.tensor(logits).float(), "prefix_mask": torch.tensor(mask).float()}
    torch.save(tensors, path)


def test_shards_are_read_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    for number in (10, 2):
        save(tmp_path / f"run.{number}.pt", [[float(number)] * GAMMA] * 2, [[1, 1, 0], [0, 0, 0]])
    (tmp_path / "notes.txt").write_text("mine")
    found = read_shards(tmp_path, gamma=GAMMA, temperature=0.7)
    assert found.z[:, 0].tolist() == [2, 2, 10, 10]
    assert found.survived.tolist() == [[True, True, False], [False] * 3] * 2
    assert (found.key.temperature, found.key.label) == (0.7, "greedy_match"), "also for sampled traffic"
    assert found.conversations == 2, "a shard is what is split and resampled"
    assert found.source == "2 shards that SGLang collected"
    before = shard_digests(tmp_path)
    save(tmp_path / "run.2.pt", [[1.0] * GAMMA], [[1, 0, 0]])
    changed = shard_digests(tmp_path)
    assert [name for name in before if before[name] != changed[name]] == ["run.2.pt"]


def test_calibration_finds_the_temperature_of_collected_shards(tmp_path: Path) -> None:
    collect(tmp_path, 40, sharpness=2.0)
    fitted = fit_temperatures(read_shards(tmp_path, gamma=GAMMA, temperature=0.0), CalibrationSettings())
    assert fitted.temperatures == pytest.approx([2.0] * GAMMA, rel=0.2)


def test_what_is_no_shard_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no shards") as caught:
        shard_files(tmp_path / "nowhere")
    assert "SGLANG_DSPARK_STS_COLLECT_PATH" in str(caught.value.hint)
    path = tmp_path / "run.0.pt"
    path.write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(DataError, match=r"run\.0\.pt: not a file of tensors"):
        read_shards(tmp_path, gamma=GAMMA, temperature=0.0)
    torch.save({"logits": torch.zeros(2, GAMMA)}, path)
    with pytest.raises(DataError, match="it has no prefix_mask"):
        read_shards(tmp_path, gamma=GAMMA, temperature=0.0)
    save(path, [[0.0] * GAMMA] * 2, [[1, 0, 0]])
    with pytest.raises(DataError, match="2 rows of logits and 1 of prefix_mask"):
        read_shards(tmp_path, gamma=GAMMA, temperature=0.0)
    save(path, [[0.0] * GAMMA] * 2, [[1, 0, 0]] * 2)
    with pytest.raises(DataError, match=r"run\.0\.pt: logits is of blocks of 3, the drafter has gamma 7"):
        read_shards(tmp_path, gamma=7, temperature=0.0)
    save(path, [[0.0] * GAMMA], [[0, 1, 0]])
    with pytest.raises(CalibrationError, match="not a prefix"):
        read_shards(tmp_path, gamma=GAMMA, temperature=0.0)
    save(path, [[np.nan] * GAMMA], [[1, 1, 0]])
    with pytest.raises(CalibrationError, match="is nan"):
        read_shards(tmp_path, gamma=GAMMA, temperature=0.0)


class Harmful:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (exec, ("raise SystemExit('unpickled')",))


def test_nothing_in_a_shard_is_ever_run(tmp_path: Path) -> None:
    torch.save({"logits": Harmful()}, tmp_path / "run.0.pt")
    with pytest.raises(DataError, match="not a file of tensors"):
        read_shards(tmp_path, gamma=GAMMA, temperature=0.0)
