import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dspark
from dspark.training.trainer import train

# Each rank reads the same data, trains, and rank 0 writes what it got.
WORKER = """
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

from dspark.config.models import TrainingSettings
from dspark.drafters.config import DrafterConfig
from dspark.training.trainer import train

torch.set_num_threads(1)
folder = Path(sys.argv[1])
config = DrafterConfig.model_validate_json((folder / "config.json").read_text())
settings = TrainingSettings.model_validate_json((folder / "settings.json").read_text())
tensors = load_file(folder / "data.safetensors")
names = ("token_ids", "taps", "last_hidden", "logsumexp")
rows = [
    SimpleNamespace(prompt_length=2, **{name: tensors[f"{name}.{index}"] for name in names})
    for index in range(int(tensors["count"]))
]
result = train(config, tensors["embedding"], tensors["head"], rows[:7], rows[7:], settings, folder / "work")
if torch.distributed.get_rank() == 0:
    save_file(result.drafter.state_dict(), folder / "result.safetensors")
    (folder / "world").write_text(str(torch.distributed.get_world_size()))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_train_what_one_trains(config, target, make_sequences, make_settings, tmp_path):
    """Two ranks with two sequences each take the steps of one process with four: denominators are global."""
    rows = make_sequences(9)
    for row in rows:
        row.prompt_length = 2
    config = config.model_copy(update={"draft_vocab_size": 16})
    settings = make_settings(steps=4, dev_every_steps=4)
    alone = train(config, *target, rows[:7], rows[7:], settings, tmp_path / "alone")

    names = ("token_ids", "taps", "last_hidden", "logsumexp")
    tensors = {f"{name}.{i}": getattr(row, name) for i, row in enumerate(rows) for name in names}
    tensors |= {"embedding": target[0], "head": target[1], "count": torch.tensor(len(rows))}
    save_file(tensors, tmp_path / "data.safetensors")
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "settings.json").write_text(settings.model_dump_json())
    (tmp_path / "worker.py").write_text(WORKER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "1"}
    common["PYTHONPATH"] = str(Path(dspark.__file__).parents[1])
    workers = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "worker.py"), str(tmp_path)],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [worker.communicate(timeout=300)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], errors
    assert (tmp_path / "world").read_text() == "2"
    together = load_file(tmp_path / "result.safetensors")
    for name, value in alone.drafter.state_dict().items():
        assert torch.allclose(value, together[name], atol=2e-5), name
