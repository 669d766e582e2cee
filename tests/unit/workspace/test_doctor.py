"""What `dspark doctor` says of the device that stages will use."""

from __future__ import annotations

import pytest

from dspark import device
from dspark.workspace import doctor
from dspark.workspace.doctor import Check, examine


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch):
    """The check, on a machine where torch and the driver see some GPUs."""

    def look(asked: str | None = None, torch: tuple[str, ...] = (), driver: tuple[str, ...] = ()) -> Check:
        monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
        monkeypatch.delenv("DSPARK_DEVICE", raising=False)
        if asked is not None:
            monkeypatch.setenv("DSPARK_DEVICE", asked)
        for module in (device, doctor):
            monkeypatch.setattr(module, "gpu_names", lambda: list(torch))
        monkeypatch.setattr(doctor, "gpus_of_the_driver", lambda: [{"name": name} for name in driver])
        (check,) = (one for one in examine(None).checks if one.name == "device")
        return check

    return look


def test_the_gpu_or_the_cpu_that_stages_will_use(found) -> None:
    check = found(torch=("NVIDIA H200",), driver=("NVIDIA H200",))
    assert (check.status, check.found) == ("ok", "cuda:0, NVIDIA H200: stages compute there")
    assert found().found == "cpu: there is no GPU"
    assert found("cpu", torch=("NVIDIA H200",)).found.startswith("cpu, as the environment asks (DSPARK_DEVICE")


def test_a_gpu_that_torch_does_not_see_is_a_warning(found) -> None:
    check = found(driver=("NVIDIA H200",))
    assert check.status == "warning" and "the driver has NVIDIA H200, torch" in check.found
    assert "CUDA" in check.fix


def test_a_device_that_is_asked_for_in_vain_is_an_error(found) -> None:
    check = found("cuda")
    assert check.status == "error" and "sees no GPU" in check.found
