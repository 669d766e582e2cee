"""A drafted block in ONNX Runtime against torch's best path: one request, the geometry of SmolLM2's drafter.

A cycle takes up the features of one verified block and drafts the next one. Nothing is kept of them, so that the
context stays as long as it is.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from pairs import ratio, report
from smollm2 import TAPS, VOCABULARY, WIDTH, drafter_config

from dspark.decoding.drafting import Proposer, TorchProposer
from dspark.decoding.draws import CounterDraws
from dspark.drafters.dspark import DSparkDrafter
from dspark.engines.onnxruntime import OnnxProposer
from dspark.export.onnx import export_onnx
from dspark.targets.record import TargetRecord

GAMMA = 4
DIGESTS = ("digest", "weights_digest", "embedding_digest", "head_digest", "tokenizer_digest", "chat_template_digest")
RECORD = TargetRecord(
    name="smollm2-135m",
    source={"kind": "random"},
    revision="none",
    dtype="float32",
    model_type="llama",
    architecture="LlamaForCausalLM",
    text_config={},
    hidden_size=WIDTH,
    num_layers=30,
    vocab_logical=VOCABULARY,
    vocab_physical=VOCABULARY,
    max_position=8192,
    taps=TAPS,
    mask_token_id=3,
    eos_token_ids=(2,),
    **dict.fromkeys(DIGESTS, "0" * 64),
)


def make_drafter(draft_vocab_size: int | None) -> DSparkDrafter:
    config = drafter_config(gamma=GAMMA, layers=2, markov_rank=64, draft_vocab_size=draft_vocab_size)
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.1
    ids = None if draft_vocab_size is None else torch.arange(draft_vocab_size) * VOCABULARY // draft_vocab_size
    return DSparkDrafter(config, embedding, embedding, ids, seed=1).eval().requires_grad_(False)


def compare(draft_vocab_size: int | None, threads: int) -> None:
    drafter = make_drafter(draft_vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        export_onnx(drafter, RECORD, Path(folder))
        onnx = OnnxProposer(Path(folder), threads=threads)
        torches = {dtype: TorchProposer(make_drafter(draft_vocab_size).to(dtype)) for dtype in DTYPES}
        for context in (64, 512, 2048):
            features = torch.randn(1, context, len(TAPS) * WIDTH, generator=torch.Generator().manual_seed(2))
            for proposer in (onnx, *torches.values()):
                proposer.begin(1, context + GAMMA + 1)
                proposer.extend(features, np.array([context]))
            equal = torch.equal(cycle(onnx, features), cycle(torches[torch.float32], features))
            for dtype, proposer in torches.items():
                measured = ratio(lambda f=features: cycle(onnx, f), lambda p=proposer, f=features: cycle(p, f))
                tokens = f", tokens {'equal' if equal else 'DIFFER'}" if dtype == torch.float32 else ""
                name = f"{threads} threads, context {context}, {draft_vocab_size or VOCABULARY} tokens to draft"
                report(f"{name}, {str(dtype).removeprefix('torch.')}{tokens}", measured)


DTYPES = (torch.float32, torch.bfloat16)


def cycle(proposer: Proposer, features: torch.Tensor) -> torch.Tensor:
    proposer.extend(features[:, : GAMMA + 1], np.array([0]))
    return proposer.propose(torch.tensor([7]), 0.0, CounterDraws([0]), np.arange(1)).tokens


if __name__ == "__main__":
    with torch.inference_mode():
        for count in (1, 2):
            torch.set_num_threads(count)
            for size in (8192, None):
                compare(size, count)
