"""Anonymous memory of training against the size of the corpus: one, four and sixteen times as many shards.

    python benchmarks/bench_memory.py

Each size trains the same drafter for the same steps in a process of its own, from a store written for it, with the dev
split growing along. Anonymous memory is what the kernel cannot take back without swapping (`RssAnon`); its largest
value over the steps counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SIZES = (1, 4, 16)
# Of the smallest corpus: shards, sequences in each, tokens in each. Half as many shards of dev split fill its budget.
SHARDS, SEQUENCES, LENGTH = 4, 32, 128
WIDTH, TAPS, VOCAB = 512, 5, 512
BUDGET_MIB = 64


def write_store(folder: Path, scale: int) -> None:
    import torch

    from dspark.corpus.sequences import TokenSequence
    from dspark.features.store import FeatureManifest, shard_key, write_shard
    from dspark.io.jsonfile import write_model

    generator = torch.Generator().manual_seed(0)
    splits = {}
    for split, shards in (("train", SHARDS * scale), ("dev", 2 * scale)):
        entries = []
        for number in range(shards):
            ids = torch.randint(0, VOCAB, (SEQUENCES, LENGTH), generator=generator)
            rows = [TokenSequence(f"{split}-{number}-{n}", "d", ids[n].tolist(), 20, "stop") for n in range(SEQUENCES)]
            tensors = {
                "taps": torch.randn(SEQUENCES * LENGTH, TAPS * WIDTH, generator=generator).bfloat16(),
                "last_hidden": torch.randn(SEQUENCES * LENGTH, WIDTH, generator=generator).bfloat16(),
                "logsumexp": torch.full((SEQUENCES * LENGTH,), 20.0),
            }
            key = shard_key("0" * 64, range(TAPS), "bfloat16", rows)
            entries.append(write_shard(folder / "store", key, rows, tensors))
        splits[split] = tuple(entries)
    manifest = FeatureManifest(
        target_digest="0" * 64, taps=tuple(range(TAPS)), dtype="bfloat16", hidden_size=WIDTH, splits=splits
    )
    write_model(folder / "manifest.json", manifest)


def anonymous() -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def train_from(folder: Path) -> None:
    import torch

    from dspark.config.models import TrainingSettings
    from dspark.drafters.config import DrafterConfig
    from dspark.features.online import open_split
    from dspark.features.store import FeatureManifest
    from dspark.io.jsonfile import read_model
    from dspark.training.trainer import train

    torch.set_num_threads(1)
    manifest = read_model(folder / "manifest.json", FeatureManifest)
    config = DrafterConfig(
        gamma=4,
        layers=1,
        taps=tuple(range(TAPS)),
        mask_token_id=1,
        hidden_size=WIDTH,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        max_position=LENGTH,
        vocab_size=VOCAB,
        markov_rank=16,
        target_model_type="llama",
        num_target_layers=12,
    )
    settings = TrainingSettings(
        steps=40, sequences_per_step=16, anchors_per_sequence=8, dev_every_steps=20, precision="float32"
    )
    largest = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal largest
        while not done.is_set():
            largest = max(largest, anonymous())
            time.sleep(0.01)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    ends = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1)) * 0.05
    splits = {
        name: open_split(manifest, name, folder / "store", sequences=list, target=lambda: None)
        for name in ("train", "dev")
    }
    train(config, ends, ends, splits["train"], splits["dev"], settings, folder / "work", read_budget=BUDGET_MIB << 20)
    done.set()
    watcher.join()
    print(json.dumps({"anonymous": largest}))


def main() -> None:
    found = {}
    for scale in SIZES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_store(folder, scale)
            size = sum(path.stat().st_size for path in (folder / "store").iterdir())
            command = [sys.executable, __file__, str(folder)]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[scale] = json.loads(said.splitlines()[-1])["anonymous"]
        growth = found[scale] / found[SIZES[0]] - 1
        print(f"corpus x{scale:<3} {size / 2**20:7.0f} MiB  {found[scale] / 2**20:7.1f} MiB anonymous  {growth:+.1%}")


if __name__ == "__main__":
    train_from(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
