"""Would a wrong rule be noticed on a real model? Sampled texts of a finished build against its target's law.

    python benchmarks/sampled_law.py WORKSPACE [BUILD] [--texts 96] [--new-tokens 24]

Prompts of the dev split are decoded at temperature 1 with the build's drafter, once as the engine does it and once with
each of a few rules wrong, and each token is placed in the target's distribution (`dspark.evaluation.sampled_law`).
Printed are the chi-square, its p-value, and how often such texts would be rejected at a false alarm of 1 in 1000.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from dspark.corpus.prompts import read_prompts
from dspark.decoding import acceptance, loop
from dspark.decoding.drafting import TorchProposer
from dspark.decoding.draws import CounterDraws
from dspark.decoding.loop import decode
from dspark.decoding.proposers import torch_proposer
from dspark.drafters.checkpoint import read_checkpoint
from dspark.evaluation.decoding import spread_prompts
from dspark.evaluation.sampled_law import ChiSquare, places
from dspark.io.jsonfile import read_json
from dspark.targets.loading import load_target
from dspark.targets.record import read_record

POWER = 0.99  # the bar


@contextlib.contextmanager
def proposals(change: Any) -> Iterator[None]:
    real = TorchProposer.propose
    with mock.patch.object(TorchProposer, "propose", lambda *arguments: change(real(*arguments))):
        yield


def warmer(one: Any) -> Any:
    probs = one.probs.sqrt()
    return dataclasses.replace(one, probs=probs / probs.sum(-1, keepdim=True))


def reused() -> Any:
    real = CounterDraws.accept

    def accept(draws: Any, probs: Any, lengths: Any, requests: Any) -> Any:
        accepted = real(draws, probs, lengths, requests)
        draws._numbers[requests] -= (lengths - accepted).astype(np.uint64)
        return accepted

    return mock.patch.object(CounterDraws, "accept", accept)


WRONG = {
    "a rejected draft is replaced from p": lambda: mock.patch.object(
        acceptance, "residual", lambda target, drafter, token_ids=None: target
    ),
    "the ratio divides by q at another temperature": lambda: proposals(warmer),
    "the ratio divides by another q": lambda: proposals(
        lambda one: dataclasses.replace(one, probs=one.probs.roll(1, 1))
    ),
    "verification at temperature 0.8": lambda: mock.patch.object(
        loop, "distribution", lambda logits, temperature, *rest: acceptance.distribution(logits, 0.8, *rest)
    ),
    "noise of a rejection used again": reused,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workspace", type=Path)
    parser.add_argument("build", nargs="?", default="smollm2-135m")
    parser.add_argument("--texts", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=24)
    arguments = parser.parse_args()
    root, build = arguments.workspace, arguments.build
    entry = read_json(root / ".dspark" / "dag.json")["builds"][build]
    record = read_record(root / "targets" / f"{entry['target']}.json")
    target = load_target(record, root, dtype="float32")
    drafter = read_checkpoint(
        root / "builds" / build / "train" / "drafter", target.embedding, target.head, record=record
    )
    proposer = torch_proposer(drafter.float())
    chosen = spread_prompts(read_prompts(root / "corpora" / entry["corpus"] / "prompts" / "dev.jsonl"), arguments.texts)
    prompts = [list(prompt.token_ids) for prompt in chosen]

    def check(name: str, changed: Any) -> ChiSquare:
        with changed:
            decoded = decode(
                target, proposer, prompts, max_new_tokens=arguments.new_tokens, temperature=1.0, batch_size=32
            )
        found = ChiSquare.of(np.concatenate(places(target, prompts, decoded)))
        verified = sum(int(one.cycles.verified.sum()) for one in decoded)
        accepted = sum(int(one.cycles.accepted.sum()) for one in decoded)
        print(
            f"{name:48} chi-square {found.statistic:8.1f}, p = {found.p_value:.2g}, power {found.power():.4f}, "
            f"{found.tokens} tokens, {accepted} of {verified} drafts accepted",
            flush=True,
        )
        return found

    right = check("as it is", contextlib.nullcontext())
    wrong = {name: check(name, changed()) for name, changed in WRONG.items()}
    missed = [name for name, found in wrong.items() if not found.rejects() or found.power() < POWER]
    if right.rejects() or missed:
        sys.exit(f"right texts {'rejected' if right.rejects() else 'accepted'}; missed: {', '.join(missed) or 'none'}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
