"""Tokens per second of the reference engine without drafts against transformers' `generate`: the same greedy texts.

    python benchmarks/bench_generate.py [WORKSPACE [BUILD]] [--threads 1] [--new-tokens 48]

Same weights, dtype and threads, one text and eight at once, prompts of different lengths; texts have a fixed length on
both sides. `generate` runs on a model as transformers loads it, with its own attention and cache. Without a workspace
the target is one of SmolLM2-135M's shape with random weights; with one it is the build's, on prompts of its corpus.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from pairs import ratio, report
from smollm2 import random_target

from dspark.corpus.sequences import read_sequences
from dspark.decoding.loop import decode
from dspark.io.jsonfile import read_json
from dspark.targets.loading import Target, load_target
from dspark.targets.record import read_record

LEAST = 1.0  # the bar


def of_workspace(root: Path, build: str) -> tuple[Target, list[list[int]]]:
    entry = read_json(root / ".dspark" / "dag.json")["builds"][build]
    target = load_target(read_record(root / "targets" / f"{entry['target']}.json"), root, dtype="float32")
    rows = read_sequences(root / "corpora" / entry["corpus"] / "responses" / "dev.jsonl")
    return target, [row.token_ids[: row.prompt_length] for row in rows if row.prompt_length <= 128]


def made_up(root: Path) -> tuple[Target, list[list[int]]]:
    draw = random.Random(0)
    return random_target(root), [[draw.randrange(4, 250) for _ in range(draw.randint(40, 100))] for _ in range(8)]


def plain_model(target: Target, root: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target.record.folder(root), dtype=target.dtype).eval()
    model.generation_config.eos_token_id = None  # texts go on to their limit
    model.generation_config.pad_token_id = 0
    return model


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """On the left, as `generate` wants it."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def compare(target: Target, model: Any, prompts: list[list[int]], new_tokens: int, pairs: int) -> float:
    inputs = padded(prompts)

    def ours() -> list[list[int]]:
        done = decode(target, None, prompts, max_new_tokens=new_tokens, batch_size=len(prompts))
        return [one.token_ids for one in done]

    def others() -> list[list[int]]:
        said = model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens)
        return said[:, inputs["input_ids"].shape[1] :].tolist()

    same = sum(a == b for a, b in zip(ours(), others(), strict=True))
    measured = ratio(ours, others, pairs=pairs, seconds=0.0)
    report(f"batch {len(prompts)}, {new_tokens} tokens each, {same} of {len(prompts)} texts the same", measured)
    return measured.value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workspace", nargs="?", type=Path)
    parser.add_argument("build", nargs="?", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.workspace or Path(folder)
        target, prompts = of_workspace(root, arguments.build) if arguments.workspace else made_up(root)
        target.eos_token_ids = frozenset()
        model = plain_model(target, root)
        print(f"{target.record.name}, {target.dtype_name}, {arguments.threads} threads: tokens/s, ours against theirs")
        found = [compare(target, model, prompts[:count], arguments.new_tokens, arguments.pairs) for count in (1, 8)]
    if min(found) < LEAST:
        sys.exit(f"below the bar: {LEAST:g}x")


if __name__ == "__main__":
    main()
