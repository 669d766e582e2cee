"""What storing features in fewer bytes costs a fixed drafter: tau and losses on the dev split of a finished build.

    python benchmarks/feature_dtypes.py WORKSPACE [BUILD]

The target computes the dev split's features once, in its own arithmetic; each way of storing rounds them, and the same
drafter is evaluated on what is read back. bfloat16 is the standard of comparison. The target's greedy tokens and
distributions come from the last hidden state as stored, so that rounding it counts against its dtype too.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from dspark.config.models import LossSettings
from dspark.corpus.sequences import read_sequences
from dspark.drafters.checkpoint import read_checkpoint
from dspark.features.compression import decode, encode
from dspark.features.forward import features_of
from dspark.features.sizes import last_hidden_groups
from dspark.io.jsonfile import read_json
from dspark.targets.loading import load_target
from dspark.targets.record import read_record
from dspark.training.development import DevBatches, dev_metrics, dev_sums
from dspark.training.objective import TrainingObjective
from dspark.training.vocabulary import draft_columns


@dataclass(frozen=True)
class Way:
    """A way of storing."""

    name: str
    taps: str
    last_hidden: str
    last_hidden_groups: int


def stored(values: torch.Tensor, dtype: str, groups: int) -> tuple[torch.Tensor, int]:
    """What is read back, and the bytes that it took."""
    codes = encode(values, dtype, groups)
    size = codes.values.nbytes + (codes.scales.nbytes if codes.scales is not None else 0)
    return decode(codes.values, codes.scales).float(), size


@torch.no_grad()
def main(root: Path, build: str) -> None:
    entry = read_json(root / ".dspark" / "dag.json")["builds"][build]
    record = read_record(root / "targets" / f"{entry['target']}.json")
    target = load_target(record, root)
    rows = read_sequences(root / "corpora" / entry["corpus"] / "responses" / "dev.jsonl")
    drafter = read_checkpoint(
        root / "builds" / build / "train" / "drafter", target.embedding, target.head, record=record
    )
    drafter = drafter.float()
    objective = TrainingObjective(drafter, LossSettings(), low_precision=False)
    names = [row.id for row in rows]
    exact = dict(
        features_of(target, [r.token_ids for r in rows], [r.prompt_length for r in rows], names, dtype="float32")
    )
    best = [
        target.logits(exact[index].last_hidden.values[row.prompt_length :].to(target.dtype)).float().argmax(-1)
        for index, row in enumerate(rows)
    ]
    columns = None
    if drafter.config.draft_vocab_size is not None:
        columns = draft_columns(drafter.draft_token_ids, drafter.config.vocab_size)
    groups = last_hidden_groups(record.hidden_size)
    ways = [
        Way("bfloat16", "bfloat16", "bfloat16", 1),
        Way("float32", "float32", "float32", 1),
        Way("int8", "int8", "int8", groups),
        Way("int8, one scale for the last hidden state", "int8", "int8", 1),
        Way("int8, last hidden state in bfloat16", "int8", "bfloat16", 1),
        Way("fp8", "fp8", "fp8", groups),
        Way("fp8, last hidden state in bfloat16", "fp8", "bfloat16", 1),
    ]
    base: dict[str, float] = {}
    header = f"{'stored as':44} {'bytes':>6} {'tau':>7} {'sampled':>8} {'CE':>7} {'L1':>7} {'argmax':>7} {'sum p':>7}"
    print(
        f"{len(rows)} sequences of the dev split, {sum(len(r.token_ids) for r in rows)} tokens, build {build}\n{header}"
    )
    for way in ways:
        split, size, kept, mass, said = [], 0, 0, 0.0, 0
        for index, row in enumerate(rows):
            features = exact[index]
            taps, taps_bytes = stored(features.taps.values, way.taps, len(record.taps))
            last, last_bytes = stored(features.last_hidden.values, way.last_hidden, way.last_hidden_groups)
            size += taps_bytes + last_bytes + 12 * len(taps)
            answer = slice(row.prompt_length, None)
            logits = target.logits(last[answer].to(target.dtype)).float()
            kept += int((logits.argmax(-1) == best[index]).sum())
            mass += float((logits - features.logsumexp[answer, None]).exp().sum(-1).sub(1).abs().sum())
            said += len(logits)
            split.append(
                SimpleNamespace(
                    domain=row.domain,
                    token_ids=torch.tensor(row.token_ids),
                    prompt_length=row.prompt_length,
                    taps=taps,
                    last_hidden=last,
                    logsumexp=features.logsumexp,
                )
            )
        dev = DevBatches(
            split, objective, target.head.float(), columns, size=8, max_length=4096, device=torch.device("cpu")
        )
        found = dev_metrics(dev_sums(objective, dev, torch.device("cpu")), drafter.config.gamma)
        figures = {"bytes": float(size), **{key: found[key] for key in found if isinstance(found[key], float)}}
        base = base or figures
        tau, sampled = (figures[name] / base[name] for name in ("dev_anchor_tau", "dev_anchor_tau_sampled"))
        print(
            f"{way.name:44} {size / base['bytes']:5.3f}x {tau - 1:+7.3%} {sampled - 1:+8.3%} "
            f"{figures['dev_cross_entropy'] - base['dev_cross_entropy']:+7.4f} "
            f"{figures['dev_l1'] - base['dev_l1']:+7.4f} {kept / said:7.3%} {mass / said:7.4f}"
        )
    print(f"bfloat16: dev_anchor_tau {base['dev_anchor_tau']:.4f}, sampled {base['dev_anchor_tau_sampled']:.4f}")


if __name__ == "__main__":
    workspace = Path(sys.argv[1])
    main(workspace, sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m")
