"""Benchmark sets from the files in which their authors release them: JSON lines, a JSON list, parquet.

A row becomes a prompt by the set's own texts (`config.suites`). Only the fields that these name are kept of it: some
releases carry gigabytes of tests beside a problem. Of a conversation the first turn is asked, and how many turns are
left out is counted.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.config.suites import FIELD, BenchmarkSet
from dspark.corpus.prompts import Prompt, Reading, Rejection, read_prompt_lines
from dspark.corpus.shapes import Message, RowError, check_characters, json_type, text_of
from dspark.errors import DataError, PreflightError
from dspark.io.jsonfile import strict_loads

_OUTSIDE = "outside"  # of the range that a set is made of: no part of it
Messages = Callable[[Mapping[str, Any]], tuple[Message, ...]]


@dataclass(frozen=True)
class SetReading:
    """What the files of a set gave.

    Attributes:
        prompts: of all rows that could be read, in the order of the files.
        rejections: rows that are part of the set and could not be read.
        outside: rows that are no part of the set (`only`).
        turns_left_out: later turns of conversations, which are not asked.
    """

    prompts: list[Prompt]
    rejections: list[Rejection]
    outside: int
    turns_left_out: int


def benchmark_files(spec: BenchmarkSet, data: Path) -> list[Path]:
    """All files of the first pattern that fits any, sorted.

    Raises:
        PreflightError: none is there; says which were looked for and where to get them.
    """
    for pattern in spec.files:
        found = sorted(path for path in data.glob(pattern) if path.is_file())
        if found:
            return found
    raise PreflightError(
        f"set {spec.name!r}: none of {', '.join(spec.files)} is in {data}",
        f"{spec.origin}; licence: {spec.licence}",
    )


def read_benchmark(spec: BenchmarkSet, data: Path) -> SetReading:
    """Read all rows of a set from the user's files.

    Raises:
        PreflightError: no file of it is there; or a parquet file, and pyarrow is not installed.
        DataError: a file that is not what its name says, or one id for two different prompts.
    """
    files = benchmark_files(spec, data)
    turns: list[int] = []

    def messages(row: Mapping[str, Any]) -> tuple[Message, ...]:
        _require_inside(spec, row)
        text, later = _prompt_of(spec, row)
        turns.append(later)
        return (Message("user", text),)

    prompts: list[Prompt] = []
    rejections: list[Rejection] = []
    for path in files:
        reading = _read(spec, path, messages)
        prompts += reading.prompts
        rejections += reading.rejections
    _refuse_ambiguous(spec, prompts)
    inside = [row for row in rejections if row.category != _OUTSIDE]
    return SetReading(prompts, inside, len(rejections) - len(inside), sum(turns))


def _read(spec: BenchmarkSet, path: Path, messages: Messages) -> Reading:
    lines = b"\n".join(_slim(line, spec.fields) for line in _lines(path, spec.fields))
    return read_prompt_lines(
        lines + b"\n", source=path.name, domain=spec.name, read_messages=messages, id_fields=spec.id
    )


def _lines(path: Path, fields: Iterable[str]) -> Iterator[bytes]:
    """The rows of a file as lines of JSON."""
    if path.suffix == ".parquet":
        yield from map(_line, _parquet_rows(path, set(fields)))
    elif path.suffix == ".json":
        yield from map(_line, _list_rows(path))
    else:
        try:
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as handle:
                for line in handle:
                    yield line.rstrip(b"\r\n")
        except (gzip.BadGzipFile, EOFError, zlib.error) as reason:
            raise DataError(f"{path}: not a gzip file: {reason}") from None


def _list_rows(path: Path) -> list[Any]:
    try:
        value = strict_loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as reason:
        raise DataError(f"{path}: not valid JSON: {reason}", "fetch it again: it may have been cut off") from None
    if not isinstance(value, list):
        raise DataError(f"{path}: must be a list of rows, is {json_type(value)}", "JSON lines are called .jsonl")
    return value


def _parquet_rows(path: Path, fields: set[str]) -> list[dict[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise PreflightError(
            f"{path}: parquet needs pyarrow, which is not installed", "pip install 'dspark[pipeline]'"
        ) from None
    try:
        columns = [name for name in parquet.read_schema(path).names if name in fields]
        rows: list[dict[str, Any]] = parquet.read_table(path, columns=columns).to_pylist()
    except (pyarrow.ArrowException, OSError) as reason:
        raise DataError(f"{path}: not a parquet file: {reason}", "fetch it again: it may have been cut off") from None
    return rows


def _line(row: Any) -> bytes:
    return json.dumps(row, default=str).encode()


def _slim(line: bytes, fields: frozenset[str]) -> bytes:
    """The row with nothing but the fields that are read; what is no row stays as it is, to be rejected."""
    try:
        row = strict_loads(line.decode("utf-8-sig"))
    except ValueError:
        return line
    return _line({name: value for name, value in row.items() if name in fields}) if isinstance(row, dict) else line


def _require_inside(spec: BenchmarkSet, row: Mapping[str, Any]) -> None:
    if spec.only is None:
        return
    value = row.get(spec.only.field)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RowError("shape", f"{spec.only.field}: must be a whole number, is {json_type(value)}")
    if not spec.only.first <= value <= spec.only.last:
        raise RowError(_OUTSIDE, f"{spec.only.field}: {value} is outside of {spec.only.first} to {spec.only.last}")


def _prompt_of(spec: BenchmarkSet, row: Mapping[str, Any]) -> tuple[str, int]:
    """The text of a row's prompt, and the later turns that it leaves out.

    Raises:
        RowError: a field of every text is missing or empty, or holds no text.
    """
    missing: dict[str, None] = {}
    for form in spec.prompts:
        paths = FIELD.findall(form)
        values = {path: _value_at(row, path) for path in paths}
        absent = [path for path, value in values.items() if _nothing(value)]
        if absent:
            missing |= dict.fromkeys(absent)
            continue
        texts = {path: text_of(path, value) for path, value in values.items()}
        text = _filled(form, texts)
        check_characters("prompt", text)
        return text, max(_later_turns(row, path) for path in paths)
    raise RowError("shape", f"{', '.join(missing)}: missing or empty")


def _filled(form: str, texts: Mapping[str, str]) -> str:
    """The form with its fields; one pass, so that a text that looks like a field stays text."""
    return FIELD.sub(lambda match: texts[match[1]], form)


def _nothing(value: Any) -> bool:
    """Whether a field holds nothing that could be asked."""
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def _value_at(row: Mapping[str, Any], path: str) -> Any:
    """What stands at `name.0.name` in a row; None where there is nothing."""
    value: Any = row
    for key in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def _later_turns(row: Mapping[str, Any], path: str) -> int:
    """How many entries of a list come after the one that a path takes."""
    keys = path.split(".")
    for depth, key in enumerate(keys):
        holder = _value_at(row, ".".join(keys[:depth])) if depth else row
        if isinstance(holder, list) and key.isdecimal():
            return len(holder) - 1 - int(key)
    return 0


def _refuse_ambiguous(spec: BenchmarkSet, prompts: Iterable[Prompt]) -> None:
    """One id in two files of a set must be one prompt: results are kept by id."""
    seen: dict[str, Prompt] = {}
    for prompt in prompts:
        first = seen.setdefault(prompt.id, prompt)
        if first.identity != prompt.identity:
            raise DataError(
                f"set {spec.name!r}: {prompt.source}:{prompt.line}: id {prompt.id!r} already stands for another prompt "
                f"({first.source}:{first.line})",
                "keep the files of one release in the folder",
            )
