"""A GPU that is not there: tensors that say `cuda:0`, are held and computed by the CPU, and refuse what a GPU refuses.

So whole loops run, to the bits of the CPU, and stop where somebody forgot a device: at an operation on tensors of both
devices (a CPU tensor without dimensions is a number, and CPU tensors may index), at `numpy()` of a tensor that is not
on the CPU, at random numbers of a CPU generator. What this cannot show: kernels, their rounding, autocast, memory,
speed.

torch itself takes these tensors for `meta` ones, the only kind besides the CPU's that a CPU build works with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda:0")
_KINDS = ("cuda", "meta")  # what torch makes of its own accord beside such a tensor is asked for as `meta`
_aten = torch.ops.aten


class Elsewhere(torch.Tensor):
    """A tensor of the GPU that is not there, around one of the CPU."""

    held: torch.Tensor
    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Elsewhere:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="meta",
            requires_grad=False,
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Elsewhere({self.held!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            special = _SPECIAL.get(func)
            if special is None or _learns(args):
                return func(*args, **(kwargs or {}))
            with torch.inference_mode(False), torch.no_grad():
                return special(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


class _Device(TorchDispatchMode):
    """Makes factories heed the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _in_parts(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return _dispatch(func, args, kwargs or {})


@contextmanager
def machine_with_a_gpu() -> Iterator[list[int]]:
    """While it lasts `cuda:0` exists; gives a list that grows by one with each `torch.cuda.synchronize`."""
    waits: list[int] = []
    changes: dict[str, Callable[..., Any]] = {
        "_lazy_init": lambda: None,
        "synchronize": lambda device=None: waits.append(len(waits)),
        "get_device_capability": lambda device=None: (7, 0),  # too old for kernels of its own in transformers
    }
    before = {name: getattr(torch.cuda, name) for name in changes}
    lifted = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=)` is made on the CPU and moved
    try:
        for name, change in changes.items():
            setattr(torch.cuda, name, change)
        with _Device():
            yield waits
    finally:
        for name, real in before.items():
            setattr(torch.cuda, name, real)
        torch._C._set_only_lift_cpu_tensors(lifted)


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    if not torch.is_inference_mode_enabled():
        return _run(func, args, kwargs)
    if _in_parts(func):
        return func.decompose(*args, **kwargs)
    with torch.inference_mode(False), torch.no_grad():  # inference tensors cannot be wrapped
        return _run(func, args, kwargs)


def _in_parts(func: Any) -> bool:
    """Whether torch hands over, as it does in inference mode, what it would have taken apart itself."""
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return torch.is_inference_mode_enabled() and composite


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    asked = kwargs.get("device")
    kind = None if asked is None else torch.device(asked).type
    if func is _aten._to_copy.default:
        rest = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
        copy = func(_plain(args[0]), **rest)
        return Elsewhere(copy) if kind in _KINDS or (kind is None and isinstance(args[0], Elsewhere)) else copy
    if func is _aten.copy_.default:
        _plain(args[0]).copy_(_plain(args[1]))
        return args[0]
    if not _there(args, kwargs) and kind not in _KINDS:
        return func(*args, **kwargs)
    if kwargs.get("generator") is not None:
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    if kind is None:
        return _compute(func, args, kwargs)
    made = func(*tree_map(_plain, args), **tree_map(_plain, kwargs | {"device": torch.device("cpu")}))
    return tree_map(_wrapped, made) if kind in _KINDS else made


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    here = [one for one in tree_leaves((args, kwargs)) if _on_cpu(one)]
    if here and _there(args, kwargs):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {DEVICE} and cpu")
    if func is _aten.histc.default and not args[0].is_floating_point():  # of experts; the CPU's counts no integers
        return Elsewhere(func(args[0].held.float(), *args[1:], **kwargs).to(args[0].dtype))
    out = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
    if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
        return None if not func._schema.returns else kwargs["out"] if "out" in kwargs else args[0]
    return tree_map(_wrapped, out)


def _get(func: Any, args: Any, kwargs: Any) -> Any:
    value, index = args
    if not isinstance(value, Elsewhere):
        raise RuntimeError(f"indices should be on the same device as the indexed tensor (cpu), found {DEVICE}")
    return Elsewhere(func(value.held, tree_map(_plain, index)))


def _set(func: Any, args: Any, kwargs: Any) -> None:
    value, index, new = args
    scattered = any(isinstance(one, torch.Tensor) for one in tree_leaves(index))
    if not isinstance(value, Elsewhere) or (scattered and _on_cpu(new)):
        raise RuntimeError(f"assignment: expected all tensors to be on the same device, found {DEVICE} and cpu")
    func(value.held, tree_map(_plain, index), _plain(new))


def _refuse_numpy(func: Any, args: Any, kwargs: Any) -> None:
    raise TypeError(f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() first")


# What would make tensors of its own on `meta`, choose a kernel by the device, or does not know subclasses.
_SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    functional.scaled_dot_product_attention: _compute,
    torch.Tensor.__getitem__: _get,
    torch.Tensor.__setitem__: _set,
    torch.Tensor.new_tensor: lambda func, args, kwargs: Elsewhere(func(args[0].held, *args[1:], **kwargs)),
    torch.Tensor.tolist: lambda func, args, kwargs: args[0].held.tolist(),
    torch.Tensor.numpy: _refuse_numpy,
    torch.Tensor.__array__: _refuse_numpy,
}


def _learns(args: Any) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(one, torch.Tensor) and one.requires_grad for one in tree_leaves(args)
    )


def _there(args: Any, kwargs: Any) -> bool:
    return any(isinstance(one, Elsewhere) for one in tree_leaves((args, kwargs)))


def _on_cpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, Elsewhere) and value.dim() > 0


def _plain(value: Any) -> Any:
    return value.held if isinstance(value, Elsewhere) else value


def _wrapped(value: Any) -> Any:
    return Elsewhere(value) if isinstance(value, torch.Tensor) and not isinstance(value, Elsewhere) else value
