"""The arithmetic of estimates: known figures, and what the code really keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dspark.config.models import (
    CalibrationSettings,
    CorpusSettings,
    DrafterSettings,
    FeatureSettings,
    ResponseSettings,
    TrainingSettings,
)
from dspark.drafters.config import DrafterConfig
from dspark.drafters.kinds import build_drafter
from dspark.drafters.sizes import drafter_size
from dspark.features.sizes import deepspec_bytes_per_token
from dspark.profiling import estimate
from dspark.profiling.estimate import Chunks, Job, Rates, SplitTokens
from dspark.profiling.rates import measure_rates
from dspark.targets.catalogue import read_target
from dspark.targets.completion import complete
from dspark.targets.shape import LayerShape, TargetShape, shape_of
from dspark.training.anchors import draw_anchors, response_mask
from dspark.training.methods import method_of

CATALOGUE = Path(__file__).parents[3] / "pipeline/targets"
PAPER = 1_240_000_000  # tokens of DeepSpec's corpus (deepspec.md, section 3.2)
RATES = Rates(flops=1e12, training_flops=2e12, bytes_per_second=1e11, training_bytes_per_second=1e11)


def job_of(name="qwen3-4b", tokens=PAPER, **changes):
    shape = shape_of(complete(read_target(CATALOGUE, name).config, name))
    block = DrafterSettings()
    fields = {
        "shape": shape,
        "drafter": drafter_size(shape, 5, block),
        "taps": 5,
        "splits": {"train": SplitTokens(tokens // 1000, tokens - tokens // 5, tokens // 5)},
        "longest": 1280,
        "longest_prompt": 1024,
        "corpus": CorpusSettings(name="c", target=name, domains=("math",)),
        "block": block,
        "training": TrainingSettings(),
        "calibration": CalibrationSettings(),
        "chunks": Chunks(8192, 64 << 20, 256, 32),
        "device": "cpu",
        "training_device": "cpu",
        "dtype": "bfloat16",
        "precision": "bfloat16",
        "read_budget": 512 << 20,
    }
    return Job(**fields | changes)


def with_features(job, **settings):
    return replace(job, corpus=job.corpus.model_copy(update={"features": FeatureSettings(**settings)}))


# ---------------------------------------------------------------- features


@pytest.mark.parametrize(
    ("name", "deepspec", "terabytes"),
    [("qwen3-4b", 30_726, 38), ("qwen3-8b", 49_158, 61), ("qwen3-14b", 61_446, 76), ("gemma4-12b", 46_086, 57)],
)
def test_the_known_figures(name, deepspec, terabytes):
    job = job_of(name)
    assert deepspec_bytes_per_token(job.shape.hidden_size, 5) == deepspec
    assert round(deepspec * PAPER / 1e12) == terabytes
    ours = {row.dtype: row for row in estimate.feature_bytes(job)}
    assert ours["bfloat16"].bytes_per_token == deepspec + 6
    assert round(ours["bfloat16"].cached / 1e12) == terabytes
    assert ours["int8"].cached == ours["fp8"].cached < 0.52 * ours["bfloat16"].cached


def test_modes():
    (row, *_) = estimate.feature_bytes(job_of())
    assert (row.online, row.hybrid) == (0, None)
    (row, *_) = estimate.feature_bytes(with_features(job_of(), mode="hybrid", cache_gib=8))
    assert row.hybrid == 8 * 2**30
    (row, *_) = estimate.feature_bytes(with_features(job_of(tokens=1000), mode="hybrid", cache_gib=8))
    assert row.hybrid == row.cached == 30_732 * 1000


# ---------------------------------------------------------------- memory


def test_weights_and_cache_of_responses():
    parts = estimate.responses_memory(job_of())
    assert parts["weights"] == 2 * 4_022_468_096
    # 36 layers of 8 key and 8 value heads of 128, in bfloat16: 147 kB a token; 64 rows of 1,280 tokens.
    assert parts["keys and values"] == 64 * 1280 * 36 * 2 * 8 * 128 * 2


def test_training_keeps_what_its_optimizer_keeps():
    """Float32 masters, gradients and AdamW's two moments: the 16 bytes a parameter that everybody counts with."""
    job = job_of()
    parts = estimate.training_memory(job)
    assert parts["weights"] + parts["gradients"] + parts["states of adamw"] == 16 * job.drafter.parameters
    muon = estimate.training_memory(replace(job, training=TrainingSettings(optimizer="muon")))
    backbone = job.drafter.parameters - job.drafter.others
    assert parts["states of adamw"] - muon["states of muon"] == 4 * backbone
    tied = parts["embedding and head of the target"]
    assert tied == 151_936 * 2560 * 2
    untied = estimate.training_memory(job_of("qwen3-8b"))["embedding and head of the target"]
    assert untied == 2 * 151_936 * 4096 * 2
    assert "the target itself" in estimate.training_memory(with_features(job, mode="online"))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_optimizer_states_are_counted_as_torch_holds_them(optimizer):
    from dspark.training.optimisation import make_optimizers

    shape = replace(job_of().shape, hidden_size=32, vocab_size=40, intermediate_size=48)
    layer = replace(shape.layers[0], heads=4, kv_heads=2, head_dim=8)
    shape = replace(shape, layers=(layer,) * 6)
    block = DrafterSettings(layers=2, gamma=4, markov={"rank": 4})
    job = job_of(shape=shape, drafter=drafter_size(shape, 5, block), training=TrainingSettings(optimizer=optimizer))

    class Fake(torch.nn.Module):
        """Parameters of the drafter's shapes under the names by which optimizers tell heads from the rest."""

        def __init__(self):
            super().__init__()
            self.backbone = torch.nn.ParameterList(torch.ones(shape) for shape in job.drafter.backbone)
            self.markov_head = torch.nn.Linear(job.drafter.others, 1, bias=False)

    drafter = Fake()
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    held = 0
    for one in make_optimizers(drafter, job.training):
        one.step()
        held += sum(value.nbytes for state in one.state.values() for value in state.values() if value.dim())
    assert estimate.training_memory(job)[f"states of {optimizer}"] == held


# ---------------------------------------------------------------- seconds


def test_a_pass_is_two_operations_per_weight_and_token():
    job = job_of("smollm2-135m", tokens=1_000_000)
    body = 134_515_008 - 49_152 * 576 - 61 * 576  # without embedding and norms
    assert job.shape.products_per_token == body
    attended = 30 * 2 * 9 * 64 * job.sequence_tokens / 2
    expected = 2 * ((body + attended) * 1_000_000 + 49_152 * 576 * 200_000) / 1e12
    assert estimate.features_seconds(job, RATES) == pytest.approx(expected)


def test_decoding_a_row_reads_all_weights():
    responses = ResponseSettings(batch_size=1, max_new_tokens=100)
    corpus = CorpusSettings(name="c", target="qwen3-8b", domains=("math",), responses=responses)
    splits = {"train": SplitTokens(1, 10, 100)}
    job = job_of("qwen3-8b", corpus=corpus, splits=splits, longest_prompt=10, longest=110)
    fast = replace(RATES, flops=1e18)
    cached = job.shape.cached_values * 60 * 2
    expected = 100 * (2 * job.shape.parameters + cached) / 1e11
    assert estimate.responses_seconds(job, fast) == pytest.approx(expected, rel=1e-3)


def test_training_time_follows_steps_and_computed_features():
    job = job_of(tokens=1_000_000)
    once = estimate.training_seconds(job, RATES)
    twice = estimate.training_seconds(replace(job, training=TrainingSettings(steps=6000)), RATES)
    assert twice == pytest.approx(2 * once)
    online = with_features(job, mode="online")
    assert estimate.training_seconds(online, RATES) > 1.5 * once
    assert estimate.features_seconds(online, RATES) == 0
    some = with_features(job, mode="hybrid", cache_gib=1)
    assert once < estimate.training_seconds(some, RATES) < estimate.training_seconds(online, RATES)
    muon = replace(job, training=TrainingSettings(optimizer="muon"))
    assert estimate.training_seconds(muon, RATES) > once


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3_moe"])
def test_this_machine_is_measured(name):
    """A layer of any target is run, with experts too; one device is measured once."""
    job = job_of("smollm2-135m", tokens=200_000, dtype="float32", precision="float32")
    if name == "qwen3_moe":
        sparse = replace(job.shape.layers[0], intermediate_size=0, experts=8, experts_per_token=2, expert_size=96)
        job = replace(job, shape=replace(job.shape, layers=(sparse,) * 30))
    rates = measure_rates(job, seconds=0.02)
    assert rates.flops > 1e7 and rates.training_flops > 1e7
    assert rates.bytes_per_second == rates.training_bytes_per_second > 1e7


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activations_are_about_what_autograd_keeps(precision):
    length, prompt, width, vocab = 200, 40, 128, 600
    layer = LayerShape(4, 2, 32, intermediate_size=384)
    shape = TargetShape("llama", width, vocab, True, 384, (layer,) * 8)
    block = DrafterSettings(layers=3, gamma=7, markov={"rank": 16})
    training = TrainingSettings(steps=1, sequences_per_step=4, anchors_per_sequence=32, precision=precision)
    corpus = CorpusSettings(
        name="c", target="t", domains=("math",), responses=ResponseSettings(max_new_tokens=length - prompt)
    )
    job = job_of(
        shape=shape,
        drafter=drafter_size(shape, 5, block),
        block=block,
        training=training,
        corpus=corpus,
        longest=length,
        longest_prompt=prompt,
        precision=precision,
    )
    config = DrafterConfig(
        gamma=7,
        layers=3,
        taps=(1, 2, 3, 4, 5),
        mask_token_id=4,
        hidden_size=width,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        rope={"rope_type": "default", "rope_theta": 1e4},
        max_position=512,
        vocab_size=vocab,
        markov_rank=16,
        target_model_type="llama",
        num_target_layers=8,
    )
    generator = torch.Generator().manual_seed(0)

    def sequence(number):
        return SimpleNamespace(
            id=str(number),
            domain="math",
            token_ids=torch.randint(10, vocab, (length,), generator=generator),
            prompt_length=prompt,
            taps=torch.randn(length, 5 * width, generator=generator).bfloat16(),
            last_hidden=torch.randn(length, width, generator=generator).bfloat16(),
            logsumexp=torch.full((length,), 9.0),
            feature_bytes=length * 6 * width * 2,
        )

    ends = 0.02 * torch.randn(vocab, width, generator=generator)
    rows = [sequence(number) for number in range(4)]
    drafter, method = build_drafter(config, ends, ends), method_of(config)
    objective = method.objective(drafter, training.loss, low_precision=precision == "bfloat16")
    mask = response_mask(length, prompt)
    batch = method.batch(rows, [draw_anchors(mask, 32, (0, number)) for number in range(4)], config, None, 512)
    weights = {value.untyped_storage().data_ptr() for value in drafter.state_dict(keep_vars=True).values()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(value):
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), value)  # held, so that no address is used twice
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        objective(batch, objective.denominators(batch))
    held = sum(size for size, _ in kept.values())
    assert 0.8 < estimate.training_memory(job)["activations"] / held < 1.4
