"""Records of an engine are taken only if they are the build's own drafter's, on the build's own target."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))  # protocol_servers.py

from protocol_servers import Engine, SGLangDouble, SGLangRecordingDouble, serving

from dspark.config.models import CalibrationSettings, ShardRecords
from dspark.corpus.prompts import PreparedPrompt
from dspark.decoding.drafting import TorchProposer
from dspark.drafters.checkpoint import read_checkpoint, write_training_checkpoint, write_union
from dspark.engines.sglang_client import SGLangClient
from dspark.errors import DataError
from dspark.evaluation.calibrate import calibrate_drafter
from dspark.evaluation.recorded import records_from_server, records_from_shards
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.io.digest import digest_file

GAMMA = 3
SETTINGS = CalibrationSettings(prompts_per_domain=4, max_new_tokens=17, dtype="float32", temperatures=(0.0, 1.0))


def prompts() -> list[PreparedPrompt]:
    return [
        PreparedPrompt(id=f"p{number}", domain="d", messages=[{"role": "user", "content": "x"}], token_ids=ids)
        for number, ids in enumerate(([3, 4], [9], [4, 4], [2]))
    ]


@pytest.fixture(scope="module")
def engine() -> Engine:
    target = tiny_target(10, spread=0.4, seed=5)
    return Engine(target, tiny_drafter(target, GAMMA, seed=3), eos_token_ids=frozenset((1,)))


def test_a_servers_records_take_the_place_of_greedy_decoding_and_of_nothing_else(engine: Engine) -> None:
    with serving(SGLangRecordingDouble(engine)) as address:
        records = records_from_server(SGLangClient(address), engine.target, engine.drafter, prompts(), SETTINGS)
    proposer = TorchProposer(engine.drafter)
    mixed = calibrate_drafter(engine.target, proposer, prompts(), SETTINGS, recorded=records)
    ours = calibrate_drafter(engine.target, proposer, prompts(), SETTINGS)
    assert [str(one.calibration.key) for one in mixed] == [str(one.calibration.key) for one in ours]
    assert [one.calibration.source for one in mixed] == [
        "SGLang 0.5.23, mode cap-accept", "the decoding loop of dspark",
    ]  # fmt: skip
    assert mixed[1].calibration == ours[1].calibration
    assert mixed[0].calibration.held_out.rows == ours[0].calibration.held_out.rows
    accepted = [[place.accepted for place in one[0].calibration.held_out.positions] for one in (mixed, ours)]
    assert accepted[0] == accepted[1]


def test_another_drafter_is_refused(engine: Engine) -> None:
    with (
        serving(SGLangRecordingDouble(engine)) as address,
        pytest.raises(DataError, match=r"another drafter: [0-9]+% of"),
    ):
        other = tiny_drafter(engine.target, GAMMA, seed=4)
        records_from_server(SGLangClient(address), engine.target, other, prompts(), SETTINGS)


def test_a_drafter_that_only_states_other_confidences_is_refused(engine: Engine) -> None:
    other = tiny_drafter(engine.target, GAMMA, seed=3)
    with torch.no_grad():
        other.confidence_head.proj.weight.mul_(1.5)
    with serving(SGLangRecordingDouble(engine)) as address, pytest.raises(DataError, match="100% of its drafts"):
        records_from_server(SGLangClient(address), engine.target, other, prompts(), SETTINGS)


def test_another_target_is_refused(engine: Engine) -> None:
    other = tiny_target(10, spread=0.4, seed=6)
    with (
        serving(SGLangRecordingDouble(engine)) as address,
        pytest.raises(DataError, match=r"another target: [0-9]+% of"),
    ):
        records_from_server(SGLangClient(address), other, tiny_drafter(other, GAMMA), prompts(), SETTINGS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculative_num_draft_tokens": 8}, "drafts blocks of 7, the build's drafter has gamma 3"),
        ({"speculative_algorithm": None}, "does not draft, the build's drafter has gamma 3"),
    ],
)
def test_blocks_of_another_size_are_refused(engine: Engine, changes: dict[str, Any], message: str) -> None:
    with serving(SGLangDouble(engine, **changes)) as address, pytest.raises(DataError, match=message) as caught:
        records_from_server(SGLangClient(address), engine.target, engine.drafter, prompts(), SETTINGS)
    assert "calibration.records.kind=decoding" in str(caught.value.hint)


def shards(folder: Path, drafter: str, target: str, temperature: float = 1.0) -> ShardRecords:
    random = np.random.default_rng(1)
    folder.mkdir(exist_ok=True)
    for number in range(2):
        torch.save(
            {"logits": torch.tensor(random.normal(size=(5, GAMMA))), "prefix_mask": torch.zeros(5, GAMMA)},
            folder / f"traffic.{number}.pt",
        )
    return ShardRecords(
        kind="shards", folder=folder.name, temperature=temperature, drafter_weights_sha256=drafter, target_digest=target
    )


def take(engine: Engine, source: ShardRecords, root: Path) -> Any:
    record = engine.target.record
    return records_from_shards(source, root, engine.drafter, record, exported="bfloat16", work=root / "work")


def test_shards_are_of_the_drafter_as_it_is_served(engine: Engine, tmp_path: Path) -> None:
    """The digest is the export's: of the union checkpoint made from what training wrote."""
    record = engine.target.record
    write_training_checkpoint(tmp_path / "train", engine.drafter, record)
    trained = read_checkpoint(tmp_path / "train", engine.target.embedding, engine.target.head, record=record)
    write_union(tmp_path / "export", trained, record, untrained=True)
    served = digest_file(tmp_path / "export" / "model.safetensors")
    records = take(engine, shards(tmp_path / "of-traffic", served, record.digest), tmp_path)
    assert (len(records), records.key.temperature, records.key.label) == (10, 1.0, "greedy_match")
    for drafter, target, message in (
        ("1" * 64, record.digest, "was collected with drafter 111111111111, the build's drafter is"),
        (served, "2" * 64, "was collected with target 222222222222, the build's target tiny is"),
    ):
        with pytest.raises(DataError, match=message):
            take(engine, shards(tmp_path / "of-traffic", drafter, target), tmp_path)


def test_greedy_matches_of_sampled_traffic_stand_beside_sampled_acceptances(engine: Engine, tmp_path: Path) -> None:
    record = engine.target.record
    write_union(tmp_path / "export", engine.drafter, record, untrained=True)
    source = shards(tmp_path / "of-traffic", digest_file(tmp_path / "export" / "model.safetensors"), record.digest)
    results = calibrate_drafter(
        engine.target, TorchProposer(engine.drafter), prompts(), SETTINGS, recorded=take(engine, source, tmp_path)
    )
    keys: Sequence[tuple[float, str]] = [
        (one.calibration.key.temperature, one.calibration.key.label) for one in results
    ]
    assert keys == [(1.0, "greedy_match"), (0.0, "greedy_match"), (1.0, "sampled")]
