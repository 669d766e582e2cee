"""What stands inside each file of a package: parsed and validated, one file at a time.

Nothing here runs, unpickles or decompresses what it reads. Any exception means that the package is not sound;
`verify` turns it into an IntegrityError that names the file.
"""

from __future__ import annotations

import csv
import importlib
import re
from collections.abc import Callable
from typing import Any, BinaryIO

from pydantic import BaseModel

from dspark.corpus.prompts import PreparedPrompt
from dspark.io.jsonfile import strict_loads
from dspark.io.yamlfile import parse_yaml
from dspark.package.gguf import GGUFHeader, read_gguf_header
from dspark.package.layout import SMOKE, Kind, place_of
from dspark.package.tensors import TensorHeader, read_header

# A validated model, the object of an engine's own JSON or YAML, a header, text; None: only the digest can tell.
Content = BaseModel | dict[str, TensorHeader] | dict[str, Any] | GGUFHeader | str | None

_MAX_TEXT = 256 * 2**20
_ONNX = b"\x08"  # field 1, the IR version

# Which model validates which of dspark's own JSON files; looked up by name, since most readers need few of them.
_MODELS = {
    r"certificate\.json": "dspark.package.certificate:Certificate",
    r"speculation_profile\.json": "dspark.package.speculation:SpeculationProfile",
    r"scheduler/scheduler\.json": "dspark.scheduling.config:SchedulerConfig",
    r"scheduler/calibration\.json": "dspark.calibration.results:CalibrationReport",
    r"scheduler/cost/[^/]+\.json": "dspark.profiling.cost:CostReport",
    r"engines/onnxruntime/io\.json": "dspark.engines.onnx_io:OnnxIO",
    r"engines/tensorrt/build\.json": "dspark.engines.tensorrt_build:Recipe",
    r"evidence/lineage\.json": "dspark.package.lineage:Lineage",
    r"evidence/parity\.json": "dspark.export.report:ParityReport",
    r"evidence/certify/[^/]+\.json": "dspark.evaluation.entry:CertificateEntry",
    r"evidence/evaluate/metrics\.json": "dspark.evaluation.results:EvaluationMetrics",
    r"evidence/evaluate/lossless\.json": "dspark.evaluation.results:LosslessReport",
    r"evidence/evaluate/paired\.json": "dspark.evaluation.paired:PairedReport",
    r"evidence/evaluate/pareto\.json": "dspark.evaluation.results:Pareto",
}
# JSON in the formats of others.
_FOREIGN = r"drafter/config\.json|engines/[^/]+/[^/]+\.json"

# A word of a script that is an absolute path: not the interpreter line, not `//`, not the end of `../..`.
_ABSOLUTE = re.compile(r"""(?:^|(?<=[\s'"=:,(\[{]))/(?!dev/null\b)[A-Za-z0-9._]""", re.MULTILINE)


def read_content(path: str, handle: BinaryIO, size: int) -> Content:
    """Parse and validate one file of a package.

    Args:
        path: relative to the package; decides what the file must be.
        handle: the open file, at its start.
        size: its bytes.
    Raises:
        Exception: whatever shows that the file is not what stands in its place.
    """
    place = place_of(path)
    if place is None:
        raise ValueError("has no place in the layout of a package")
    if place.kind == "safetensors":
        return read_header(handle, size)
    if place.kind == "gguf":
        return read_gguf_header(handle, size)
    if place.kind == "onnx":
        if not handle.read(8).startswith(_ONNX):
            raise ValueError("does not begin as an ONNX file does")
        return None
    if place.kind == "opaque":
        return None
    if size > _MAX_TEXT:
        raise ValueError(f"larger than {_MAX_TEXT} bytes")
    return _READERS[place.kind](path, _text(handle.read()))


def _text(data: bytes) -> str:
    text = data.decode("utf-8")
    if any((character < " " and character not in "\n\t") or character == "\x7f" for character in text):
        raise ValueError("holds control characters")
    return text


def _json(path: str, text: str) -> Content:
    value = strict_loads(text)
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    for pattern, name in _MODELS.items():
        if re.fullmatch(pattern, path):
            return _validated(name, value)
    if re.fullmatch(_FOREIGN, path):
        return value
    raise ValueError("is a JSON file whose schema this version of dspark does not know")


def _validated(name: str, value: dict[str, Any]) -> BaseModel:
    module, _, attribute = name.partition(":")
    model: type[BaseModel] = getattr(importlib.import_module(module), attribute)
    expected = model.model_fields["schema_"].default if "schema_" in model.model_fields else None
    if value.get("schema") != expected:
        raise ValueError(f"schema is {value.get('schema')!r}, this version of dspark reads {expected!r}")
    return model.model_validate(value)


def _json_lines(path: str, text: str) -> None:
    # Not by splitlines: a prompt may hold what Unicode counts as the end of a line.
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), start=1):
        row = strict_loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is not a JSON object")
        if path == SMOKE:
            PreparedPrompt.model_validate(row)


def _csv(path: str, text: str) -> None:
    rows = list(csv.reader(text.splitlines(), strict=True))
    if not rows or len(set(rows[0])) != len(rows[0]) or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError("is not a table with one cell per named column in every row")


def _script(path: str, text: str) -> str:
    first, _, rest = text.partition("\n")
    if first != "#!/usr/bin/env bash":
        raise ValueError("does not begin with #!/usr/bin/env bash")
    if found := _ABSOLUTE.search(rest):
        raise ValueError(f"holds an absolute path: {rest[found.start() :].split()[0]}")
    return text


def _environment(path: str, text: str) -> str:
    for line in text.splitlines():
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*=[A-Za-z0-9_.,:%+@-]*", line):
            raise ValueError(f"{line!r} is not an assignment that needs no quoting")
    return text


def _yaml(path: str, text: str) -> dict[str, Any]:
    value = parse_yaml(text)
    if not isinstance(value, dict):
        raise ValueError("is not a YAML mapping")
    return value


def _plain(path: str, text: str) -> str:
    return text


_READERS: dict[Kind, Callable[[str, str], Content]] = {
    "json": _json,
    "jsonlines": _json_lines,
    "csv": _csv,
    "shell": _script,
    "env": _environment,
    "yaml": _yaml,
    "markdown": _plain,
}
