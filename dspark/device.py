"""Where tensors are computed: this machine's accelerator, or the device that a serving profile declares.

Stages take the GPU that torch sees, and the CPU if it sees none. `DSPARK_DEVICE` overrides that: `cpu` leaves GPUs
alone, `cuda` refuses to do without one; which GPU it is, is CUDA_VISIBLE_DEVICES' to say. The variable is no setting of
a build: results agree to rounding wherever they are computed, and nothing runs again because of it. What is measured
for a serving profile is measured on what the profile names, whatever is faster.

torch is loaded only where its devices have to be counted.
"""

from __future__ import annotations

import os

from dspark.config.models import ServingProfile
from dspark.errors import PreflightError, SettingsError

VARIABLE = "DSPARK_DEVICE"
CPU, CUDA = "cpu", "cuda"
_MEND = "see `dspark doctor`: torch has to be a build with CUDA, and its GPU in CUDA_VISIBLE_DEVICES if that is set"
_TRUE = ("1", "true", "yes", "on", "y", "t")  # as accelerate reads it


def asked_for() -> str | None:
    """What the environment asks for, `cpu` or `cuda`; None: nothing.

    `accelerate launch --cpu` asks for the CPU too: what feeds training is computed where training is.

    Raises:
        SettingsError: `DSPARK_DEVICE` is something else.
    """
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value in (CPU, CUDA):
        return value
    if value:
        raise SettingsError(
            f"{VARIABLE} is {value!r}: it can be {CPU} or {CUDA}",
            "to choose between GPUs set CUDA_VISIBLE_DEVICES" if value.startswith(CUDA) else f"unset {VARIABLE}",
        )
    return CPU if os.environ.get("ACCELERATE_USE_CPU", "").strip().lower() in _TRUE else None


def accelerator() -> str:
    """Where stages compute what no serving profile is measured by: `cuda:<index>`, or `cpu` where torch sees no GPU.

    Of several processes on one machine each has a GPU of its own, the one that accelerate trains on in it.

    Raises:
        PreflightError: `DSPARK_DEVICE` asks for a GPU, and torch sees none.
        SettingsError: it is neither `cpu` nor `cuda`.
    """
    asked = asked_for()
    if asked == CPU:
        return CPU
    names = gpu_names()
    if names:
        return f"{CUDA}:{max(int(os.environ.get('LOCAL_RANK', '0')), 0) % len(names)}"
    if asked == CUDA:
        raise PreflightError(f"{VARIABLE} is {CUDA}, {_seen(names)}", f"{_MEND}; or unset {VARIABLE}")
    return CPU


def declared(profile: ServingProfile) -> str:
    """torch's type of the device that a profile declares: `cpu` or `cuda`."""
    return CPU if profile.hardware.accelerator.lower() == CPU else CUDA


def serving_device(profile: ServingProfile) -> str:
    """Where a profile is measured: with access `local` on what it declares, else on the accelerator.

    Raises:
        PreflightError: torch sees no GPU of that name, or `DSPARK_DEVICE` forbids to use it.
    """
    if profile.access != "local":
        return accelerator()
    if declared(profile) == CPU:
        return CPU
    wanted = f"serving profile {profile.name} is measured on {profile.hardware}"
    if asked_for() == CPU:
        raise PreflightError(f"{wanted}, {VARIABLE} is {CPU}", f"unset {VARIABLE} (or ACCELERATE_USE_CPU)")
    names = gpu_names()
    name = profile.hardware.accelerator.lower()
    fitting = [index for index, found in enumerate(names) if name in found.lower()]
    if fitting:
        return f"{CUDA}:{fitting[0]}"
    raise PreflightError(f"{wanted}, {_seen(names)}", _MEND)


def gpu_names() -> list[str]:
    """The GPUs that torch sees, by index."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(index) for index in range(count)]


def memory_error(failure: BaseException) -> bool:
    """Whether a device, or the machine, has run out of memory; loads no torch."""
    return isinstance(failure, MemoryError) or type(failure).__name__ == "OutOfMemoryError"


def _seen(names: list[str]) -> str:
    import torch

    return f"torch {torch.__version__} sees {', '.join(names) or 'no GPU'}"
