"""Two processes against one: the same step, the same checkpoints, whether weights are copied or spread."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import dspark
from dspark.config.models import LossSettings
from dspark.errors import Interrupted, PreflightError
from dspark.io.progress import Progress
from dspark.training.processes import Processes
from dspark.training.trainer import Trainer, train

HEADLESS = {"markov_type": "none", "markov_rank": 0, "confidence": False}
KINDS = {
    "dspark": ({"draft_vocab_size": 16}, LossSettings()),
    "dspark-rnn": ({"markov_type": "rnn"}, LossSettings()),
    "dflash": (HEADLESS, LossSettings(confidence=0)),
    "eagle3": (HEADLESS | {"kind": "eagle3"}, LossSettings(labels="soft", cross_entropy=1, l1=0, confidence=0)),
}
# Both processes read the same store, each its own sequences. For each kind and each way of sharing: the gradient of the
# first step, whole. Then, of the first kind, on from the checkpoint of step 2, until the second process is told to stop
# during step 3, of which the first one knows nothing. Of the last kind, two steps to the end.
WORKER = """
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dspark.config.models import TrainingSettings
from dspark.drafters.config import DrafterConfig
from dspark.errors import Interrupted
from dspark.features.sources import FeatureRow, StoredFeatures
from dspark.features.store import ShardEntry
from dspark.io import progress
from dspark.training.processes import whole
from dspark.training.trainer import Trainer, train

torch.set_num_threads(1)
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
kinds, entries = json.loads((folder / "kinds.json").read_text()), json.loads((folder / "entries.json").read_text())
ends = load_file(folder / "ends.safetensors")
source = StoredFeatures([ShardEntry.model_validate(entry) for entry in entries], folder / "store")
rows = [FeatureRow(source, index) for index in range(len(source))]

class Stop(progress.Progress):
    def advance(self, count=1, **fields):
        super().advance(count)
        if rank == 1:
            progress.request_stop()

for kind, way in ((kind, way) for kind in kinds for way in ("copied", "spread")):
    os.environ["ACCELERATE_USE_FSDP"] = "true" if way == "spread" else "false"
    progress._stop.clear()
    config, settings = DrafterConfig.model_validate(kinds[kind][0]), TrainingSettings.model_validate(kinds[kind][1])
    arguments = (config, ends["embedding"], ends["head"], rows[:7], rows[7:], settings)
    trainer = Trainer(*arguments, folder / "none")
    assert (trainer.processes.count, trainer.processes.sharded) == (2, way == "spread")
    norm, sums = trainer.learner.gradients(trainer.steps.batches(0))
    gradients = {name: whole(parameter.grad) for parameter, name in trainer.learner.names.items()}
    held = sum(getattr(one, "to_local", lambda one=one: one)().numel() for one in trainer.learner.names)
    if rank == 0:
        found = {"norm": torch.tensor(norm), "sums": sums, "held": torch.tensor(held)}
        save_file(gradients | found, folder / f"{kind}-{way}.safetensors")
    trainer.steps.close()
    if kind == "eagle3":
        result = train(*arguments[:-1], settings.model_copy(update={"steps": 2}), folder / f"{kind}-{way}")
        if rank == 0:
            save_file(result.drafter.state_dict(), folder / f"{kind}-{way}-trained.safetensors")
        assert result.first == (rank == 0)
    if kind != "dspark":
        continue
    try:
        train(*arguments, folder / way, Stop())
        raise AssertionError("training was not stopped")
    except Interrupted:
        pass
torch.distributed.destroy_process_group()
"""


class StopAfter(Progress):
    def __init__(self, steps):
        self.left = steps

    def advance(self, count=1, **fields):
        self.left -= count
        if self.left == 0:
            raise Interrupted("stopped")


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one_and_either_goes_on_from_the_other(
    config, target, make_sequences, make_settings, store_entries, tmp_path
):
    """Steps 1 and 2 in one process, 3 and 4 in two, 5 and 6 in one again, against six in one.

    The loss and the gradients of one step of four sequences agree to 1e-6 of their size for drafters of every kind,
    also where each of two processes computes its two sequences in two parts. A checkpoint has one optimizer state, as
    large as that of one process; spread weights are held by halves. Chains go to the end in two processes, by Muon:
    their drafter is in one piece again.
    """
    rows = make_sequences(9)
    for row in rows:
        row.prompt_length = 2
    configs = {kind: config.model_copy(update=changes) for kind, (changes, _) in KINDS.items()}
    arguments = (configs["dspark"], *target, rows[:7], rows[7:])
    whole = make_settings()
    alone = train(*arguments, whole, tmp_path / "alone")
    for way in ("copied", "spread"):
        with pytest.raises(Interrupted):
            train(*arguments, whole, tmp_path / way, StopAfter(2))

    chain_settings = make_settings(optimizer="muon", loss=KINDS["eagle3"][1], steps=2)
    optimizers = dict.fromkeys(KINDS, "adamw") | {"eagle3": "muon"}
    save_file({"embedding": target[0], "head": target[1]}, tmp_path / "ends.safetensors")
    kinds = {
        kind: [
            configs[kind].model_dump(mode="json"),
            make_settings(optimizer=optimizers[kind], accumulation=2, loss=loss).model_dump(mode="json"),
        ]
        for kind, (_, loss) in KINDS.items()
    }
    (tmp_path / "kinds.json").write_text(json.dumps(kinds))
    (tmp_path / "entries.json").write_text(json.dumps([entry.model_dump(mode="json") for entry in store_entries(rows)]))
    launch(tmp_path, WORKER)

    for kind, (_, loss) in KINDS.items():
        trainer = Trainer(configs[kind], *target, rows[:7], rows[7:], make_settings(loss=loss), tmp_path / "none")
        norm, sums = trainer.learner.gradients(trainer.steps.batches(0))
        for way in ("copied", "spread"):
            found = load_file(tmp_path / f"{kind}-{way}.safetensors")
            assert found["norm"].item() == pytest.approx(norm, rel=1e-6)
            assert torch.allclose(found["sums"], sums, rtol=1e-6, atol=0)
            for parameter, name in trainer.learner.names.items():
                assert (found[name] - parameter.grad).norm() <= 1e-6 * parameter.grad.norm(), (kind, way, name)
            parameters = sum(parameter.numel() for parameter in trainer.learner.names)
            share = found["held"].item() / parameters
            assert share == 1 if way == "copied" else 0.5 <= share < 0.55
    wanted = train(configs["eagle3"], *target, rows[:7], rows[7:], chain_settings, tmp_path / "chains").drafter
    for way in ("copied", "spread"):
        trained = load_file(tmp_path / f"eagle3-{way}-trained.safetensors")
        for name, value in wanted.state_dict().items():  # Muon rounds to bfloat16 where the processor can
            assert (trained[name] - value).norm() <= 0.02 * value.norm(), (way, name)
        folder = tmp_path / way / "step-000004"
        assert sorted(path.name for path in folder.iterdir()) == [
            "model.safetensors",
            "optimizer.safetensors",
            "state.json",
        ]
        one = tmp_path / "alone" / "step-000004" / "optimizer.safetensors"
        assert (folder / "optimizer.safetensors").stat().st_size == one.stat().st_size
        continued = train(*arguments, whole, tmp_path / way)
        for name, value in alone.drafter.state_dict().items():
            assert torch.allclose(value, continued.drafter.state_dict()[name], atol=2e-5), (way, name)


def launch(folder, worker):
    """Run two processes that find each other, and wait for both."""
    (folder / "worker.py").write_text(worker)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "1"}
    common["PYTHONPATH"] = str(Path(dspark.__file__).parents[1])
    workers = [
        subprocess.Popen(
            [sys.executable, str(folder / "worker.py"), str(folder)],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [worker.communicate(timeout=300)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], errors


def test_processes_that_read_different_checkpoints_are_told_to_share_their_files(monkeypatch):
    processes = Processes()
    processes.agree(4, "the newest checkpoint", "work")  # alone: with whom should it disagree?
    processes.count = 2
    monkeypatch.setattr(processes, "summed", lambda value: value + 2)  # the other one found step 2
    with pytest.raises(PreflightError, match="the newest checkpoint is not the same in all 2 processes") as caught:
        processes.agree(4, "the newest checkpoint", "work")
    assert "put work on a file system that all nodes share" in caught.value.hint
    processes.agree(2, "the newest checkpoint", "work")


def test_a_stop_that_one_process_hears_of_stops_all(monkeypatch):
    processes = Processes()
    assert processes.stop_together()  # alone: at once
    asked = SimpleNamespace(stop=False)
    monkeypatch.setattr("dspark.training.processes.stop_requested", lambda: asked.stop)
    monkeypatch.setattr("dspark.training.processes.request_stop", lambda: setattr(asked, "stop", True))
    processes.count = 2
    monkeypatch.setattr(processes, "summed", lambda value: value)
    assert not processes.stop_together()
    monkeypatch.setattr(processes, "summed", lambda value: value + 1)  # the other one
    assert processes.stop_together()
    assert asked.stop
