"""The ONNX Runtime proposer against the torch proposer: the same blocks after the same history of a ragged batch."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # elsewhere.py

from elsewhere import DEVICE, machine_with_a_gpu

from dspark.decoding.drafting import TorchProposer
from dspark.decoding.draws import CounterDraws
from dspark.decoding.truncation import Truncation
from dspark.engines.onnx_io import CACHED, ENDS, IO_FILE, WEIGHTS
from dspark.engines.onnxruntime import CPU, OnnxProposer, check_providers, open_session, providers_on
from dspark.errors import DataError, IntegrityError, PreflightError, SettingsError

DRAWS = CounterDraws([0, 1, 2])


def ask(proposer: Any, anchors: list[int]) -> tuple[list[list[int]], torch.Tensor]:
    proposal = proposer.propose(torch.tensor(anchors), 0.0, DRAWS, np.arange(len(anchors)))
    assert proposal.probs is None
    return proposal.tokens.tolist(), proposal.confidence_logits


def test_it_drafts_what_torch_drafts_through_rejections_and_finished_rows(trained: Any, exported: Path):
    """Prompt of three rows, cycles that keep 1 to 4 of 4 positions (the rest is garbage), a row that ends first."""
    generator = torch.Generator().manual_seed(0)
    pair = (TorchProposer(trained.drafter), OnnxProposer(exported, threads=1))
    for proposer in pair:
        proposer.begin(3, 40)
    rows = 3
    history = [("extend", np.array([5, 1, 9]), 9), ("extend", np.array([1, 4, 2]), 4), ("keep", [2, 1], 0)]
    history += [("extend", np.array([3, 1]), 4), ("extend", np.array([1, 1]), 1), ("keep", [0], 0)]
    history += [("extend", np.array([4]), 4)]
    for action, what, width in history:
        if action == "keep":
            rows = len(what)
            for proposer in pair:
                proposer.keep(what)
        else:
            features = torch.randn(rows, width, 48, generator=generator)
            for proposer in pair:
                proposer.extend(features, what)
        anchors = torch.randint(0, 61, (rows,), generator=generator).tolist()
        (tokens, confidences), (found, near) = (ask(proposer, anchors) for proposer in pair)
        assert found == tokens, action
        torch.testing.assert_close(near, confidences, atol=1e-4, rtol=0)


def test_positions_that_no_block_followed_are_not_lost(trained: Any, exported: Path):
    generator = torch.Generator().manual_seed(3)
    pair = (TorchProposer(trained.drafter), OnnxProposer(exported, threads=1))
    features = torch.randn(2, 6, 48, generator=generator)
    for proposer in pair:
        proposer.begin(2, 20)
        proposer.extend(features[:, :4], np.array([4, 2]))
        proposer.extend(features[:, 4:], np.array([1, 2]))  # no propose in between
    assert ask(pair[0], [7, 8])[0] == ask(pair[1], [7, 8])[0]
    assert ask(pair[1], [7, 8])[0] == ask(pair[1], [7, 8])[0]  # asking again changes nothing


def test_rows_join_whether_or_not_features_of_the_others_wait(trained: Any, exported: Path):
    """One row; a second joins right after a verification, which no block followed yet; a third after a block."""
    generator = torch.Generator().manual_seed(8)
    pair = (TorchProposer(trained.drafter), OnnxProposer(exported, threads=1))
    steps: list[tuple[str, Any, int]] = [
        ("join", [5], 6), ("extend", [2], 3), ("join", [4], 4), ("ask", [7, 8], 0), ("extend", [1, 3], 3),
        ("ask", [9, 1], 0), ("join", [2], 2), ("ask", [3, 4, 5], 0), ("extend", [3, 1, 2], 3), ("keep", [2, 1], 0),
        ("join", [6], 7), ("ask", [6, 2, 11], 0), ("keep", [], 0), ("join", [3, 1], 3), ("ask", [5, 5], 0),
    ]  # fmt: skip
    for proposer in pair:
        proposer.begin(3, 20)
        proposer.keep([])
    for action, what, width in steps:
        features = torch.randn(len(what), width, 48, generator=generator)
        if action == "ask":
            (tokens, confidences), (found, near) = (ask(proposer, what) for proposer in pair)
            assert found == tokens
            torch.testing.assert_close(near, confidences, atol=1e-4, rtol=0)
            continue
        for proposer in pair:
            if action == "keep":
                proposer.keep(what)
            else:
                getattr(proposer, action)(features, np.array(what))
    with pytest.raises(SettingsError, match="room for 3 rows, not for 2 beside 2"):
        pair[1].join(torch.zeros(2, 1, 48), np.array([1, 1]))


def test_cut_distributions_are_refused(exported: Path):
    proposer = OnnxProposer(exported, threads=1)
    proposer.begin(1, 4)
    with pytest.raises(SettingsError, match="draws from whole distributions"):
        proposer.propose(torch.tensor([1]), 0.7, DRAWS, np.arange(1), Truncation(5))


def test_beginning_again_forgets_everything(trained: Any, exported: Path):
    generator = torch.Generator().manual_seed(4)
    proposer = OnnxProposer(exported, threads=1)
    features = torch.randn(1, 5, 48, generator=generator)
    blocks = []
    for _ in range(2):
        proposer.begin(1, 10)
        proposer.extend(features.bfloat16(), np.array([5]))  # features come in the target's dtype
        blocks.append(ask(proposer, [4]))
        proposer.extend(torch.randn(1, 5, 48, generator=generator), np.array([5]))
    assert blocks[0][0] == blocks[1][0] and torch.equal(blocks[0][1], blocks[1][1])


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_drawn_tokens_come_with_the_distributions_that_torch_draws_them_from(
    trained: Any, exported: Path, temperature: float
):
    """Behind the tokens that were drawn before it, every slot's distribution is torch's at that temperature."""
    drafter = trained.drafter
    features = torch.randn(2, 6, 48, generator=torch.Generator().manual_seed(5))
    pair = (TorchProposer(drafter), OnnxProposer(exported, threads=1))
    for proposer in pair:
        proposer.begin(2, 20)
        proposer.extend(features, np.array([6, 3]))
    anchors = torch.tensor([7, 8])
    found = pair[1].propose(anchors, temperature, CounterDraws([3, 4]), np.arange(2))
    assert found.probs is not None and found.indices is not None and found.token_ids is not None
    assert torch.equal(found.token_ids[found.indices], found.tokens)
    assert torch.equal(found.token_ids, drafter.draft_token_ids)
    with torch.no_grad():
        hidden, chain = drafter.block_from_cache(anchors, pair[0]._context), drafter.chain()
        base = drafter.base_logits(hidden)
        before = torch.cat([anchors.unsqueeze(1), found.tokens[:, :-1]], 1)
        biases = [chain.bias(before[:, slot], hidden[:, slot]) for slot in range(3)]
        logits = base + torch.stack(biases, 1)
    torch.testing.assert_close(found.probs, (logits / temperature).softmax(-1), atol=1e-5, rtol=0)


def test_tokens_are_drawn_as_often_as_their_distribution_says(trained: Any, exported: Path):
    """4000 draws of a first token: chi-square over all 23 tokens, false alarm 1e-3; drawing greedily would fail."""
    from scipy import stats

    rows = 200
    proposer = OnnxProposer(exported, threads=1)
    features = torch.randn(1, 6, 48, generator=torch.Generator().manual_seed(6)).expand(rows, -1, -1)
    counts, expected = np.zeros(23), np.zeros(23)
    draws = CounterDraws(range(rows))
    proposer.begin(rows, 10)
    proposer.extend(features, np.full(rows, 6))
    for _ in range(20):
        found = proposer.propose(torch.full((rows,), 7), 1.5, draws, np.arange(rows))
        counts += np.bincount(found.indices[:, 0].numpy(), minlength=23)
        expected += found.probs[:, 0].double().sum(0).numpy()
    often = expected >= 5
    grouped = [np.append(side[often], side[~often].sum()) for side in (counts, expected)]
    kept = [side[grouped[1] > 0] for side in grouped]
    assert len(kept[0]) > 3 and stats.chisquare(*kept, sum_check=False).pvalue > 1e-3
    assert counts.max() < 0.98 * counts.sum()


def test_draws_that_are_no_numbers_are_refused(exported: Path):
    class Enumerated:
        pass

    proposer = OnnxProposer(exported, threads=1)
    proposer.begin(1, 4)
    with pytest.raises(SettingsError, match="which Enumerated does not have"):
        proposer.propose(torch.tensor([1]), 0.7, Enumerated(), np.arange(1))  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused(exported: Path):
    proposer = OnnxProposer(exported, threads=1)
    proposer.begin(1, 4)
    with pytest.raises(SettingsError, match="does not fit into 4"):
        proposer.extend(torch.zeros(1, 5, 48), np.array([5]))
    with pytest.raises(SettingsError, match="does not fit"):
        proposer.extend(torch.zeros(1, 2, 48), np.array([3]))
    with pytest.raises(SettingsError, match="47 wide, this drafter reads 48"):
        proposer.extend(torch.zeros(1, 2, 47), np.array([2]))


def test_a_provider_that_is_not_there_is_an_error_and_never_the_cpu_instead(exported: Path):
    with pytest.raises(PreflightError, match="no CUDAExecutionProvider here") as caught:
        OnnxProposer(exported, threads=1, providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    assert "dspark[gpu]" in caught.value.hint


def test_on_a_gpu_it_runs_on_the_one_that_the_profile_is_measured_on(exported: Path, monkeypatch: pytest.MonkeyPatch):
    import onnxruntime

    assert providers_on("cpu") == CPU
    wanted = (("CUDAExecutionProvider", {"device_id": 2}), "CPUExecutionProvider")
    assert providers_on("cuda:2") == wanted
    with pytest.raises(PreflightError, match="no CUDAExecutionProvider here"):
        OnnxProposer(exported, threads=1, providers=wanted)
    asked: list[Any] = []

    class Session:
        def __init__(self, model: str, options: Any, providers: list[Any]) -> None:
            asked.extend(providers)

        def get_providers(self) -> list[str]:
            return ["CUDAExecutionProvider", "CPUExecutionProvider"]

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: Session.get_providers(None))  # type: ignore[arg-type]
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    OnnxProposer(exported, threads=1, providers=wanted)
    assert tuple(asked) == wanted


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_takes_what_lies_on_a_gpu_and_puts_its_drafts_there(exported: Path, temperature: float):
    features, anchors = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(6)), torch.tensor([7, 8])

    def block(device: torch.device | str) -> Any:
        proposer = OnnxProposer(exported, threads=1)
        proposer.begin(2, 10)
        proposer.extend(features.to(device), np.array([5, 3]))
        return proposer.propose(anchors.to(device), temperature, CounterDraws([0, 1]), np.arange(2))

    expected = block("cpu")
    with machine_with_a_gpu():
        found = block(DEVICE)
        for name, value in vars(expected).items():
            there = getattr(found, name)
            assert (value is None) is (there is None), name
            if value is not None:
                assert there.device == DEVICE and torch.equal(there.cpu(), value), name


def test_a_provider_that_fails_to_start_is_noticed():
    """What ONNX Runtime does without CUDA's libraries: it warns, takes the CPU and goes on."""
    with pytest.raises(PreflightError, match="silently took CPUExecutionProvider"):
        check_providers(["CUDAExecutionProvider"], ["CPUExecutionProvider"])
    with pytest.raises(PreflightError):
        check_providers(["CUDAExecutionProvider", "CPUExecutionProvider"], ["CPUExecutionProvider"])
    check_providers(["CUDAExecutionProvider"], ["CUDAExecutionProvider", "CPUExecutionProvider"])


def test_the_session_has_the_threads_that_were_asked_for(exported: Path):
    options = open_session(exported / CACHED, threads=1).get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (1, 1)


def test_without_onnx_runtime_the_error_says_what_to_install(exported: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(PreflightError, match="not installed") as caught:
        OnnxProposer(exported, threads=1)
    assert "dspark[cpu]" in caught.value.hint


def test_a_package_that_leaves_the_targets_ends_out_says_what_makes_them(exported: Path, tmp_path: Path):
    shutil.copytree(exported, tmp_path / "onnx")
    (tmp_path / "onnx" / ENDS).unlink()
    with pytest.raises(PreflightError, match="embedding and head") as caught:
        OnnxProposer(tmp_path / "onnx", threads=1)
    assert "dspark package materialise" in caught.value.hint


def test_damaged_files_are_errors_of_integrity(exported: Path, tmp_path: Path):
    folder = tmp_path / "copy"
    shutil.copytree(exported, folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(IntegrityError, match="cannot load"):
        OnnxProposer(folder, threads=1)
    (folder / CACHED).write_bytes(b"no graph")
    with pytest.raises(IntegrityError, match="cannot load"):
        OnnxProposer(folder, threads=1)
    raw = json.loads((folder / IO_FILE).read_text())
    (folder / IO_FILE).write_text(json.dumps(raw | {"schema": "dspark/onnx-io/2"}))
    with pytest.raises(DataError, match="dspark/onnx-io/2"):
        OnnxProposer(folder, threads=1)
