"""GGUF files: keys and tensors, written and read through the `gguf` package with the keys' names as they are.

The package names no key of the architectures written here, and its helpers that do are of no use: every key is spelled
out by whoever owns the format. A file is atomic, its bytes depend on its content alone, and tensors are made one at a
time, so that a target of any size can be written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dspark.errors import IntegrityError, PreflightError
from dspark.io.atomic import atomic_path

if TYPE_CHECKING:
    from types import ModuleType

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Precision = Literal["F32", "F16", "Q8_0"]
INTEGERS: Literal["I64"] = "I64"  # a tensor of integers, such as token ids
BLOCK = 32  # values that share a scale in Q8_0
ARCHITECTURE = "general.architecture"
FILE_TYPE = "general.file_type"
TOKENIZER = "tokenizer."  # what all keys of a vocabulary begin with
TOKENS = "tokenizer.ggml.tokens"
MASK = "tokenizer.ggml.mask_token_id"
# Tensors of a Llama-like layer, as transformers and as llama.cpp call them.
LAYER_TENSORS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
# Norms of queries and keys, which Qwen3 and the drafter have besides.
HEAD_NORMS = {"self_attn.q_norm.weight": "attn_q_norm.weight", "self_attn.k_norm.weight": "attn_k_norm.weight"}
# llama.cpp's numbers for what most of a file's tensors are.
_FILE_TYPES: dict[Precision, int] = {"F32": 0, "F16": 1, "Q8_0": 7}


@dataclass(frozen=True)
class Key:
    """One value of a GGUF file with its type.

    Attributes:
        value: a number, a text, a truth value, or a list of one of these.
        kind: of the value or of the list's items, as GGUF calls it: UINT32, INT32, FLOAT32, BOOL, STRING, ...
    """

    value: Any
    kind: str


Keys = Mapping[str, Key]


@dataclass(frozen=True)
class TensorSource:
    """A tensor to write.

    Attributes:
        shape: row-major, as numpy has it; GGUF tools list it the other way round.
        load: makes its values, float32 (int64 for integers) of that shape; called once, when it is this tensor's turn.
        precision: what is stored.
    """

    shape: tuple[int, ...]
    load: Callable[[], Floats] | Callable[[], Integers]
    precision: Precision | Literal["I64"]


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file that was read.

    Attributes:
        path: of the file.
        keys: without the counts and the version that every file begins with.
        shapes: of each tensor, row-major.
        types: of each tensor: F32, F16, Q8_0, I64, ...
    """

    path: Path
    keys: dict[str, Key]
    shapes: dict[str, tuple[int, ...]]
    types: dict[str, str]

    def value(self, name: str) -> Any:
        """A key's value, None if it is not there."""
        return self.keys[name].value if name in self.keys else None

    def tokenizer(self) -> dict[str, Key]:
        """The keys of the vocabulary."""
        return {name: key for name, key in self.keys.items() if name.startswith(TOKENIZER)}

    def tensors(self) -> dict[str, Floats]:
        """All tensors but those of integers as float32, quantised ones decoded."""
        package = gguf_package()
        reader = package.GGUFReader(self.path)
        return {
            tensor.name: np.asarray(package.quants.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(
                self.shapes[tensor.name]
            )
            for tensor in reader.tensors
            if self.types[tensor.name] != INTEGERS
        }

    def integers(self) -> dict[str, Integers]:
        """All tensors of integers."""
        reader = gguf_package().GGUFReader(self.path)
        return {
            tensor.name: np.array(tensor.data, np.int64)
            for tensor in reader.tensors
            if self.types[tensor.name] == INTEGERS
        }


def gguf_package() -> ModuleType:
    """The `gguf` package.

    Raises:
        PreflightError: it is not installed.
    """
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise PreflightError("GGUF files need the gguf package", "pip install 'dspark[llamacpp]'") from None
    package: ModuleType = gguf
    return package


def precision_of(shape: Sequence[int], wanted: Precision) -> Precision:
    """What a tensor is stored as in a file of precision `wanted`.

    Vectors stay F32, as llama.cpp demands; matrices whose rows do not divide into blocks of Q8_0 become F16.
    """
    if len(shape) < 2:
        return "F32"
    return "F16" if wanted == "Q8_0" and shape[-1] % BLOCK else wanted


def file_type(precision: Precision) -> Key:
    """The key `general.file_type` of a file whose matrices have this precision."""
    return Key(_FILE_TYPES[precision], "UINT32")


def write_gguf(path: Path, keys: Keys, tensors: Mapping[str, TensorSource]) -> None:
    """Write a GGUF file atomically, keys and tensors in the order given.

    Args:
        keys: with `general.architecture` among them.
    Raises:
        PreflightError: the gguf package is missing.
    """
    package = gguf_package()
    types, kinds = package.GGMLQuantizationType, package.GGUFValueType
    with atomic_path(path) as temporary:
        writer = package.GGUFWriter(temporary, keys[ARCHITECTURE].value)
        try:
            for name, key in keys.items():
                if name == ARCHITECTURE:
                    continue  # the writer has put it first
                if isinstance(key.value, list):
                    writer.add_key_value(name, key.value, kinds.ARRAY, kinds[key.kind])
                else:
                    writer.add_key_value(name, key.value, kinds[key.kind])
            for name, tensor in tensors.items():
                stored = types[tensor.precision]
                writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), _bytes(tensor), stored)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors.values():
                writer.write_tensor_data(_stored(package, tensor))
        finally:
            writer.close()


def read_gguf(path: Path) -> GGUFFile:
    """Read the keys of a GGUF file and what its tensors are.

    Raises:
        IntegrityError: missing, or no GGUF file.
        PreflightError: the gguf package is missing.
    """
    package = gguf_package()
    if not path.is_file():
        raise IntegrityError(f"{path}: file not found")
    try:
        reader = package.GGUFReader(path)
        keys = {
            name: Key(field.contents(), field.types[-1].name)
            for name, field in reader.fields.items()
            if not name.startswith("GGUF.")
        }
    # The package lets through whatever breaks first: a struct cut short, a name that is no UTF-8, a wild offset.
    except Exception as reason:
        raise IntegrityError(f"{path}: not a GGUF file: {reason}") from None
    shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors}
    types = {tensor.name: str(tensor.tensor_type.name) for tensor in reader.tensors}
    return GGUFFile(path, keys, shapes, types)


def _stored(package: ModuleType, tensor: TensorSource) -> NDArray[Any]:
    kind = np.int64 if tensor.precision == INTEGERS else np.float32
    values = np.ascontiguousarray(tensor.load(), kind).reshape(tensor.shape)
    if tensor.precision == INTEGERS:
        return values
    quantised: NDArray[Any] = package.quants.quantize(values, package.GGMLQuantizationType[tensor.precision])
    return quantised


def _bytes(tensor: TensorSource) -> int:
    count = int(np.prod(tensor.shape))
    # A block of Q8_0 is a scale of two bytes and one byte per value.
    sizes = {"F32": 4 * count, "F16": 2 * count, "Q8_0": count // BLOCK * (BLOCK + 2), INTEGERS: 8 * count}
    return sizes[tensor.precision]
