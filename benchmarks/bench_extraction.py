"""Extraction against the target's bare forward pass without its head: the same sequences, the same batches.

    python benchmarks/bench_extraction.py [WORKSPACE [BUILD]]

Without a workspace the target is one of SmolLM2-135M's shape with random weights, with prompts and responses of the
demo's lengths; with one it is the build's own, on the first sequences of its corpus.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import torch
from pairs import ratio, report
from smollm2 import random_target

from dspark.config.models import FeatureSettings
from dspark.corpus.sequences import TokenSequence, read_sequences
from dspark.features.extraction import extract
from dspark.features.forward import BATCH_TOKENS, plan_batches
from dspark.io.jsonfile import read_json
from dspark.targets.loading import Target, load_target
from dspark.targets.record import read_record

SEQUENCES = 24


def made_up(root: Path) -> tuple[Target, list[TokenSequence]]:
    draw = random.Random(0)
    rows = []
    for number in range(SEQUENCES):
        prompt, response = draw.randint(40, 100), draw.randint(60, 160)
        ids = [draw.randrange(4, 250) for _ in range(prompt + response)]
        rows.append(TokenSequence(f"{number}", "d", ids, prompt, "stop"))
    return random_target(root), rows


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if len(sys.argv) > 1:
            root, build = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m"
            entry = read_json(root / ".dspark" / "dag.json")["builds"][build]
            target = load_target(read_record(root / "targets" / f"{entry['target']}.json"), root)
            rows = read_sequences(root / "corpora" / entry["corpus"] / "responses" / "train.jsonl")[:SEQUENCES]
        else:
            target, rows = made_up(folder)
        lengths = [len(row.token_ids) for row in rows]
        cpu = target.device.type == "cpu"
        batches = [[index] for index in range(len(rows))] if cpu else plan_batches(lengths, BATCH_TOKENS)
        ids = []
        for batch in batches:
            padded = torch.zeros(len(batch), max(lengths[index] for index in batch), dtype=torch.int64)
            for row, index in enumerate(batch):
                padded[row, : lengths[index]] = torch.tensor(rows[index].token_ids)
            ids.append(padded.to(target.device))
        runs = iter(range(10**6))

        def bare() -> None:
            for batch in ids:
                target.last_hidden(batch)

        def extraction(dtype: str) -> None:
            settings = FeatureSettings.model_validate({"dtype": dtype})
            extract(target, {"train": rows}, settings, folder / f"store-{next(runs)}")

        tokens = sum(lengths)
        answered = sum(length - row.prompt_length for length, row in zip(lengths, rows, strict=True))
        print(f"{len(rows)} sequences, {tokens} tokens, {answered / tokens:.0%} of them of responses")
        for dtype in ("bfloat16", "int8", "fp8"):
            # `ratio` is how many times as long the other way takes: the bare forward against extraction.
            measured = ratio(lambda dtype=dtype: extraction(dtype), bare, pairs=7, seconds=0.1)
            report(f"tokens/s of extraction as {dtype} against the bare forward", measured)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
