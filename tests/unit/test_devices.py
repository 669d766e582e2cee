"""Everything that a target takes part in, on a GPU that is not there (elsewhere.py): the CPU's results, to the bit.

And the proof that this says something: a device forgotten in any of the modules stops the work.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState

sys.path.insert(0, str(Path(__file__).parent))  # elsewhere.py
sys.path.insert(0, str(Path(__file__).parent / "drafters"))  # foreign_layouts.py

from elsewhere import DEVICE, Elsewhere, machine_with_a_gpu
from foreign_layouts import LAYOUTS, write

from dspark.config.models import (
    DrafterSettings,
    FeatureSettings,
    MarkovSettings,
    Sampling,
    ServingProfile,
    TrainingSettings,
)
from dspark.corpus.sequences import TokenSequence
from dspark.decoding import cache as slot_cache
from dspark.decoding import loop
from dspark.decoding.clock import now
from dspark.decoding.loop import decode
from dspark.decoding.policies import Fixed, NoDrafts, Threshold
from dspark.decoding.proposers import torch_proposer
from dspark.decoding.truncation import Truncation
from dspark.drafters import attention, dspark, eagle3
from dspark.drafters import cache as context_cache
from dspark.drafters.base import Drafter
from dspark.drafters.checkpoint import read_checkpoint, write_union
from dspark.drafters.config import DrafterConfig
from dspark.drafters.foreign import load_drafter
from dspark.drafters.kinds import build_drafter
from dspark.engines import replay as replaying
from dspark.engines.replay import replay
from dspark.evaluation import lossless
from dspark.evaluation.lossless import check_greedy
from dspark.evaluation.overfit import overfit
from dspark.evaluation.throughput import NONE, Arm, compare
from dspark.evaluation.tiny import tiny_target
from dspark.features.extraction import extract
from dspark.features.sources import read_split
from dspark.profiling.steps import profile_engine
from dspark.targets import generation
from dspark.targets.generation import generate
from dspark.targets.loading import Target
from dspark.training import losses, objective

PROMPTS = [[3, 4, 5], [7] * 9, [2, 9, 30, 4, 5]]
REPLY = [5, 6, 7, 8, 9, 10]
VOCABULARY = 40
NO_HEAD = MarkovSettings(type="none")
DRAFTERS = {
    "dspark": DrafterSettings(gamma=3, layers=2, markov=MarkovSettings(rank=4)),
    "reduced": DrafterSettings(gamma=3, layers=1, markov=MarkovSettings(rank=4), draft_vocab_size=20),
    "gated": DrafterSettings(gamma=3, layers=1, markov=MarkovSettings(type="gated", rank=4)),
    "rnn": DrafterSettings(gamma=3, layers=1, markov=MarkovSettings(type="rnn", rank=4)),
    "dflash": DrafterSettings(gamma=3, layers=1, markov=NO_HEAD, confidence=False),
    "eagle3": DrafterSettings(kind="eagle3", gamma=3, layers=1, markov=NO_HEAD, confidence=False),
}
Paths = dict[str, Callable[[Target, Drafter], Any]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def on(device: torch.device, settings: DrafterSettings = DRAFTERS["dspark"], target: Target | None = None) -> Any:
    """A target, and a drafter on it, on a device."""
    target = target if target is not None else tiny_target(VOCABULARY, spread=0.3)
    if device != torch.device("cpu"):
        target = copy.copy(target)
        target.model = copy.deepcopy(target.model).to(device)
    config = DrafterConfig.of(target.record, settings)
    ids = torch.arange(0, VOCABULARY, 2) if settings.draft_vocab_size else None
    drafter = build_drafter(config, target.embedding, target.head, ids, seed=1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)  # proposals that vary from token to token
        if settings.draft_vocab_size:
            drafter.markov_head.reset_constant_channel()
    return target, drafter.to(target.device, target.dtype)


def told(decoded: Any) -> Any:
    """What a decoding says of itself, but for times."""
    return [
        (one.token_ids, one.cycles.drafted.tolist(), one.cycles.accepted.tolist(), one.cycles.verified.tolist())
        for one in decoded
    ]


def generated(target: Target, **fields: Any) -> Any:
    drawn = generate(target, PROMPTS, max_new_tokens=9, sampling=Sampling(**fields), seed=3)
    return [one.token_ids for one in drawn]


def decoded(target: Target, drafter: Drafter, **options: Any) -> Any:
    return told(decode(target, torch_proposer(drafter), PROMPTS, max_new_tokens=10, batch_size=3, **options))


def losslessness(target: Target, drafter: Drafter) -> Any:
    texts = decode(target, torch_proposer(drafter), PROMPTS, max_new_tokens=10)
    return check_greedy(target, PROMPTS, ["a", "b", "c"], texts).model_dump()


PATHS: Paths = {
    "answers, most likely tokens": lambda target, drafter: generated(target, temperature=0.0),
    "answers, nucleus": lambda target, drafter: generated(target, temperature=0.8, top_k=0, top_p=0.9),
    "answers, top k": lambda target, drafter: generated(target, temperature=0.8, top_k=5, top_p=0.9),
    "answers, all": lambda target, drafter: generated(target, temperature=1.0, top_k=0, top_p=1.0),
    "plain": lambda target, drafter: told(decode(target, None, PROMPTS, max_new_tokens=10)),
    "greedy": lambda target, drafter: decoded(target, drafter),
    "cut": lambda target, drafter: decoded(target, drafter, policy=Fixed(2)),
    "by confidence": lambda target, drafter: decoded(target, drafter, policy=Threshold(0.5)),
    "sampled": lambda target, drafter: decoded(target, drafter, temperature=0.9),
    "sampled, nucleus": lambda target, drafter: decoded(
        target, drafter, temperature=0.9, truncation=Truncation(12, 0.9)
    ),
    "losslessness": losslessness,
    "replay": lambda target, drafter: replay(target, drafter, PROMPTS[0], REPLY, len(REPLY), ended=False, cut=False),
}


@pytest.mark.parametrize("path", PATHS)
def test_a_gpu_says_what_the_cpu_says(path: str) -> None:
    expected = PATHS[path](*on(torch.device("cpu")))
    with machine_with_a_gpu():
        assert PATHS[path](*on(DEVICE)) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("kind", sorted(set(DRAFTERS) - {"dspark"}))
def test_so_does_every_kind_of_drafter(kind: str, temperature: float) -> None:
    expected = decoded(*on(torch.device("cpu"), DRAFTERS[kind]), temperature=temperature)
    with machine_with_a_gpu():
        assert decoded(*on(DEVICE, DRAFTERS[kind]), temperature=temperature) == expected


@pytest.mark.parametrize("path", ["answers, nucleus", "greedy", "sampled", "replay"])
def test_so_it_does_in_bfloat16(path: str) -> None:
    def pair(device: torch.device) -> Any:
        return on(device, target=tiny_target(VOCABULARY, spread=0.3, dtype=torch.bfloat16))

    expected = PATHS[path](*pair(torch.device("cpu")))
    with machine_with_a_gpu():
        assert PATHS[path](*pair(DEVICE)) == expected


def test_so_does_every_family(family_target: Target) -> None:
    def work(target: Target, drafter: Drafter) -> Any:
        return generated(target, temperature=0.8, top_k=0, top_p=0.9), decoded(target, drafter)

    expected = work(*on(torch.device("cpu"), target=family_target))
    with machine_with_a_gpu():
        assert work(*on(DEVICE, target=family_target)) == expected


def test_features_of_sequences_that_share_a_pass_are_those_of_sequences_alone_to_rounding(tmp_path: Path) -> None:
    settings = FeatureSettings(dtype="float32", sequences_per_shard=4, batch_tokens=32)
    prompts = [PROMPTS[number % 3] for number in range(5)]
    rows = [TokenSequence(f"{n}#0", "d", [*one, *REPLY[: 2 + n]], len(one), "stop") for n, one in enumerate(prompts)]

    def work(target: Target, folder: Path) -> Any:
        manifest = extract(target, {"train": rows}, settings, folder)
        return manifest, read_split(manifest, "train", folder)

    manifest, alone = work(on(torch.device("cpu"))[0], tmp_path / "cpu")
    with machine_with_a_gpu():
        again, together = work(on(DEVICE)[0], tmp_path / "gpu")
        unchanged, _ = work(on(DEVICE)[0], tmp_path / "cpu")
    assert [entry.key for entry in again.splits["train"]] == [entry.key for entry in manifest.splits["train"]]
    assert unchanged == manifest, "what lies in the store is used wherever it was computed"
    for one, other in zip(alone, together, strict=True):
        assert not isinstance(other.taps, Elsewhere) and one.id == other.id
        for name in ("taps", "last_hidden", "logsumexp"):
            torch.testing.assert_close(getattr(other, name), getattr(one, name), equal_nan=True)


@pytest.mark.parametrize("kind", ["reduced", "dflash"])
def test_checkpoints_are_read_to_where_the_target_is(kind: str, tmp_path: Path) -> None:
    target, drafter = on(torch.device("cpu"), DRAFTERS[kind])
    write_union(tmp_path / "union", drafter, target.record, dtype="float32", untrained=True)
    expected = decoded(target, read_checkpoint(tmp_path / "union", target.embedding, target.head))
    with machine_with_a_gpu():
        there, _ = on(DEVICE)
        found = read_checkpoint(tmp_path / "union", there.embedding, there.head, record=there.record)
        assert devices_of(found) == {DEVICE}
        # The union is taken back to what was trained: a drafter of its own, made for the loop.
        proposer = torch_proposer(found)
        assert proposer.drafter is not found and devices_of(proposer.drafter) == {DEVICE}
        assert decoded(there, found) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_so_are_those_of_others(layout: str, tmp_path: Path) -> None:
    target, drafter = on(torch.device("cpu"))
    write(tmp_path / "d", LAYOUTS[layout](drafter), drafter.state_dict())
    expected = decoded(target, load_drafter(tmp_path / "d", target.record, target.embedding, target.head))
    with machine_with_a_gpu():
        there, _ = on(DEVICE)
        found = load_drafter(tmp_path / "d", there.record, there.embedding, there.head)
        assert devices_of(found) == {DEVICE}
        assert decoded(there, found) == expected


def devices_of(drafter: Drafter) -> set[torch.device]:
    return {value.device for value in (*drafter.parameters(), *drafter.buffers()) if value.numel()}


def test_times_are_taken_when_the_gpu_has_done_its_work() -> None:
    profile = ServingProfile.model_validate(
        {"name": "gpu", "engine": "reference", "access": "local", "hardware": {"accelerator": "NVIDIA"}}
        | {"dtype": "float32", "requests": (1,), "contexts": (8, 20), "warmup": 1, "repeats": 5}
    )
    with machine_with_a_gpu() as waits:
        target, drafter = on(DEVICE)
        assert now(DEVICE) <= now(DEVICE) and len(waits) == 2
        batch = loop.Batch(
            target, torch_proposer(drafter), PROMPTS, range(3), max_new_tokens=9, policy=Fixed(), temperature=0.0,
            draws=loop.CounterDraws(range(3)),
        )  # fmt: skip
        batch.prefill()
        assert len(waits) == 2 + 2
        batch.cycle()
        assert len(waits) == 4 + 4, "when it begins, when it has drafted, verified, and read what was verified"
        reduced = DrafterConfig.of(target.record, DRAFTERS["reduced"])
        report = profile_engine(target, reduced, profile, {})
        assert {row.requests for row in report.rows} == {1}
        before = len(waits)
        arms = [Arm(NONE, None, NoDrafts()), Arm("fixed", torch_proposer(drafter), Fixed())]
        compare(target, arms, PROMPTS, rounds=2, max_new_tokens=1)
        assert len(waits) - before == 2 * (1 + 2) * (2 + 2)  # arms, rounds and a warm-up, around a prefill


def test_a_cpu_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("there is no GPU to wait for"))
    assert now(torch.device("cpu")) <= now(torch.device("cpu"))


@pytest.mark.parametrize("training", [torch.device("cpu"), DEVICE], ids=["beside a CPU", "on the same GPU"])
@pytest.mark.parametrize("kind", ["dspark", pytest.param("eagle3", marks=pytest.mark.long)])
def test_answers_features_training_and_decoding_together(
    kind: str, training: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DSPARK_DEVICE", raising=False)
    monkeypatch.setattr("accelerate.state.check_cuda_p2p_ib_support", lambda: True)

    def work(target: Target) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        report = overfit(
            target, PROMPTS, DRAFTERS[kind], TrainingSettings(precision="float32"), steps=6, learning_rate=0.02,
            max_new_tokens=10, share=0.9,
        )  # fmt: skip
        return report.accepted, report.greedy_match, report.equal_answers

    try:
        expected = work(on(torch.device("cpu"))[0])
        monkeypatch.setattr(PartialState, "default_device", training)
        with machine_with_a_gpu():
            assert work(on(DEVICE)[0]) == expected
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


# ---------------------------------------------------------------- what a forgotten device does


class Forgetful:
    """torch, but for the device of what it makes."""

    def __getattr__(self, name: str) -> Any:
        real = getattr(torch, name)
        if name not in ("arange", "zeros", "ones", "tensor", "full", "empty", "eye", "rand"):
            return real
        return lambda *args, **kwargs: real(*args, **{key: kwargs[key] for key in kwargs if key != "device"})


# `loop`, `acceptance` and `sampling` make indices alone, which may lie on the CPU.
FORGOTTEN: list[tuple[ModuleType, str, str]] = [
    (generation, "answers, nucleus", "dspark"),
    (slot_cache, "plain", "dspark"),
    (dspark, "greedy", "dspark"),
    (context_cache, "greedy", "dspark"),
    (eagle3, "greedy", "eagle3"),
    (replaying, "replay", "dspark"),
    (lossless, "losslessness", "dspark"),
]


@pytest.mark.parametrize(("module", "path", "kind"), FORGOTTEN, ids=lambda value: getattr(value, "__name__", value))
def test_a_device_that_is_forgotten_is_noticed(
    module: ModuleType, path: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine_with_a_gpu():
        pair = on(DEVICE, DRAFTERS[kind])
        PATHS[path](*pair)
        monkeypatch.setattr(module, "torch", Forgetful())
        with pytest.raises((RuntimeError, TypeError), match=r"same device|indices should be"):
            PATHS[path](*pair)


def test_so_is_one_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.state.check_cuda_p2p_ib_support", lambda: True)
    monkeypatch.delenv("DSPARK_DEVICE", raising=False)
    monkeypatch.setattr(PartialState, "default_device", DEVICE)
    for module in (attention, losses, objective):
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            with machine_with_a_gpu(), monkeypatch.context() as patch:
                target, _ = on(DEVICE)
                patch.setattr(module, "torch", Forgetful())
                with pytest.raises(RuntimeError, match="same device"):
                    overfit(
                        target, PROMPTS, DRAFTERS["dspark"], TrainingSettings(precision="float32"), steps=2,
                        learning_rate=0.02, max_new_tokens=10, share=0.9,
                    )  # fmt: skip
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def test_the_gpu_that_is_not_there_refuses_what_a_gpu_refuses() -> None:
    with machine_with_a_gpu():
        there, here = torch.ones(2, 3, device=DEVICE), torch.ones(2, 3)
        for mix in (
            lambda: there + here,
            lambda: torch.cat([there, here]),
            lambda: there @ here.T,
            lambda: torch.where(there > 0, there, here),
            lambda: there.gather(1, torch.zeros(2, 1, dtype=torch.int64)),
            lambda: here[torch.zeros(1, dtype=torch.int64, device=DEVICE)],
            lambda: there.__setitem__(torch.tensor([0]), here[0]),
        ):
            with pytest.raises(RuntimeError, match="same device"):
                mix()
        with pytest.raises(TypeError, match="convert cuda:0"):
            there.numpy()
        with pytest.raises(TypeError, match="convert cuda:0"):
            np.asarray(there)
        with pytest.raises(RuntimeError, match="device type for generator"):
            torch.rand(2, generator=torch.Generator(), device=DEVICE)
        # And allows what a GPU allows.
        there[torch.tensor([1])] = 2.0
        there[0] = here[0]
        there *= torch.tensor(2.0)
        assert there.tolist() == [[2.0, 2.0, 2.0], [4.0, 4.0, 4.0]] == there.cpu().numpy().tolist()
        assert (there.sum().item(), there.device, here.to(there.device).device) == (18.0, DEVICE, DEVICE)
