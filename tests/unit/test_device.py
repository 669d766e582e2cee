"""Which device computes what. The GPUs of these tests are names in a list; loops on one are in test_devices.py."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dspark import device
from dspark.config.models import Hardware, ServingProfile
from dspark.device import accelerator, asked_for, declared, memory_error, serving_device
from dspark.errors import PreflightError, SettingsError

CHECKOUT = Path(__file__).resolve().parents[2]
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DSPARK_DEVICE", "ACCELERATE_USE_CPU", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    def have(*names: str) -> None:
        monkeypatch.setattr(device, "gpu_names", lambda: list(names))

    have()
    return have


def profile(accelerator: str = "cpu", **changes: object) -> ServingProfile:
    fields = {"name": "here", "engine": "reference", "access": "local", "hardware": {"accelerator": accelerator}}
    return ServingProfile.model_validate(fields | changes)


def test_stages_take_the_gpu_that_is_there(gpus) -> None:
    assert accelerator() == "cpu"
    gpus(H200)
    assert accelerator() == "cuda:0"


def test_each_process_of_a_machine_has_a_gpu_of_its_own_as_accelerate_deals_them(gpus, monkeypatch) -> None:
    gpus(H200, H200, H200)
    for rank in range(5):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert accelerator() == f"cuda:{rank % 3}"
    monkeypatch.setenv("LOCAL_RANK", "-1")  # some launchers say so of a process alone
    assert accelerator() == "cuda:0"


@pytest.mark.parametrize(("variable", "value"), [("DSPARK_DEVICE", " CPU "), ("ACCELERATE_USE_CPU", "True")])
def test_the_environment_keeps_stages_on_the_cpu(gpus, monkeypatch, variable: str, value: str) -> None:
    gpus(H200)
    monkeypatch.setenv(variable, value)
    assert accelerator() == "cpu" == asked_for()


def test_a_gpu_that_was_asked_for_and_is_not_there_is_refused(gpus, monkeypatch) -> None:
    monkeypatch.setenv("DSPARK_DEVICE", "cuda")
    with pytest.raises(PreflightError, match=r"DSPARK_DEVICE is cuda, torch .* sees no GPU") as caught:
        accelerator()
    assert "dspark doctor" in caught.value.hint
    gpus(H200)
    assert accelerator() == "cuda:0"


@pytest.mark.parametrize(("value", "hint"), [("cuda:1", "CUDA_VISIBLE_DEVICES"), ("gpu", "unset"), ("tpu", "unset")])
def test_other_words_are_refused(gpus, monkeypatch, value: str, hint: str) -> None:
    monkeypatch.setenv("DSPARK_DEVICE", value)
    with pytest.raises(SettingsError, match=f"'{value}': it can be cpu or cuda") as caught:
        accelerator()
    assert hint in caught.value.hint


def test_a_profile_is_measured_on_what_it_declares_whatever_is_faster(gpus, monkeypatch) -> None:
    gpus(H200, H100)
    assert serving_device(profile()) == "cpu" == declared(profile("CPU"))
    assert serving_device(profile("nvidia h100")) == "cuda:1"
    assert serving_device(profile("NVIDIA")) == "cuda:0"
    monkeypatch.setenv("LOCAL_RANK", "1")  # of training's processes, none of a profile's business
    assert serving_device(profile("NVIDIA")) == "cuda:0"


def test_what_a_profile_declares_elsewhere_leaves_the_accelerator_to_the_stages(gpus) -> None:
    far = profile("NVIDIA B300", engine="sglang", access="none", reason="far away")
    assert serving_device(far) == "cpu"
    gpus(H200)
    assert serving_device(far) == "cuda:0"


def test_a_profile_whose_gpu_is_not_there_or_not_to_be_used_is_refused(gpus, monkeypatch) -> None:
    with pytest.raises(PreflightError, match=r"profile here is measured on 1 x NVIDIA H100, torch .* sees no GPU"):
        serving_device(profile("NVIDIA H100"))
    gpus(H200)
    with pytest.raises(PreflightError, match="sees NVIDIA H200"):
        serving_device(profile("NVIDIA H100"))
    monkeypatch.setenv("DSPARK_DEVICE", "cpu")
    with pytest.raises(PreflightError, match="measured on 1 x NVIDIA H200, DSPARK_DEVICE is cpu"):
        serving_device(profile(H200))
    assert serving_device(profile()) == "cpu"


def test_the_reference_engine_runs_on_one_accelerator() -> None:
    with pytest.raises(ValueError, match="runs on one accelerator"):
        profile(hardware=Hardware(accelerator="NVIDIA H100", count=2))
    assert profile(hardware=Hardware(accelerator="cpu")).hardware.count == 1


def test_torch_names_its_own_gpus(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: [H100, H200][index])
    assert device.gpu_names() == [H100, H200]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a driver that is not loaded
    assert device.gpu_names() == []


def test_running_out_of_memory_is_known_by_name() -> None:
    assert memory_error(torch.OutOfMemoryError("CUDA out of memory")) and memory_error(MemoryError())
    assert not memory_error(RuntimeError("x"))


def test_the_choice_loads_no_torch_unless_devices_are_counted() -> None:
    code = (
        "import os, sys; from dspark.device import *; from dspark.profiling.fingerprint import fingerprint\n"
        "from dspark.config.models import ServingProfile\n"
        "asked_for(); fingerprint(ServingProfile(name='a', engine='reference', access='local'))\n"
        "os.environ['DSPARK_DEVICE'] = 'cpu'; accelerator(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT).returncode == 0


def test_training_goes_where_the_stages_go(monkeypatch) -> None:
    from accelerate.state import AcceleratorState, PartialState

    from dspark.training.processes import Processes, process_state

    def anew(seen: bool) -> tuple[str, str]:
        """What accelerate chooses in a process of its own, on a machine with or without a GPU."""
        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setattr(PartialState, "default_device", torch.device("cuda" if seen else "cpu"))
        training = Processes().device.type
        AcceleratorState._reset_state(reset_partial_state=True)
        return training, process_state().device.type

    try:
        monkeypatch.setattr("accelerate.state.check_cuda_p2p_ib_support", lambda: True)
        assert anew(seen=True) == ("cuda", "cuda")
        monkeypatch.setenv("DSPARK_DEVICE", "cpu")
        assert anew(seen=True) == ("cpu", "cpu")
        monkeypatch.setenv("DSPARK_DEVICE", "cuda")
        monkeypatch.setattr(device, "gpu_names", list)
        with pytest.raises(PreflightError, match="sees no GPU"):
            Processes()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_every_stage_names_the_device_of_its_target() -> None:
    """`load_target` has a default, the CPU, that no stage may fall into."""
    found = []
    for path in [*CHECKOUT.glob("stages/*.py"), *CHECKOUT.glob("dspark/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "load_target":
                found.append((path.name, "device" in {word.arg for word in node.keywords}))
    assert len(found) >= 14
    assert [name for name, named in found if not named] == []
