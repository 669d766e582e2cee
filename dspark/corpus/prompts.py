"""Prompts: what one is, how a file of them is read, and which of them say the same.

Nothing is dropped without a trace: every line that is not blank ends up as a prompt or as a `Rejection`, so that
kept + rejected == input. Blank lines are neither; they are counted.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark.corpus.shapes import Message, RowError, check_characters, json_type, messages_of
from dspark.errors import DataError
from dspark.io.digest import digest_json
from dspark.io.jsonfile import strict_loads, validation_text
from dspark.io.jsonlines import read_jsonlines

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Prompt:
    """A conversation that the target is to answer.

    Args:
        id: `<domain>/<id in its source>`, unique in a corpus.
        domain: name of the domain.
        template: name of the template it was made from, unique in its domain; None for a prompt of its own.
        messages: turns, the user's last.
        source: the file it came from, as the domain names it.
        line: 1-based line in that file.
    """

    id: str
    domain: str
    template: str | None
    messages: tuple[Message, ...]
    source: str
    line: int

    @property
    def root(self) -> str:
        """The first user turn, normalised: a conversation and its own beginnings share it."""
        return normalise(next(message.content for message in self.messages if message.role == "user"))

    @property
    def identity(self) -> str:
        """Digest of the normalised conversation: equal for duplicates."""
        return digest_json([[message.role, normalise(message.content)] for message in self.messages])


@dataclass(frozen=True)
class Rejection:
    """A row that was not kept, and why. `category` is what such rows are counted under."""

    source: str
    line: int
    id: str | None
    category: str
    reason: str
    domain: str


class Reading(NamedTuple):
    """What a source gave: len(prompts) + len(rejections) is the number of its rows."""

    prompts: list[Prompt]
    rejections: list[Rejection]
    blank_lines: int


class PreparedPrompt(BaseModel):
    """A row of `prompts/<split>.jsonl`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str = Field(min_length=1)
    domain: str = Field(min_length=1)
    template: str | None = None
    messages: list[dict[str, str]] = Field(min_length=1)
    token_ids: list[int] = Field(min_length=1)  # the rendered prompt, assistant header included


def normalise(text: str) -> str:
    """Text in Unicode's composed form (NFC) with every run of white space as one blank and none at the ends."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def read_prompt_lines(
    data: bytes,
    *,
    source: str,
    domain: str,
    read_messages: Callable[[Mapping[str, Any]], tuple[Message, ...]] = messages_of,
    id_fields: tuple[str, ...] = ("id",),
) -> Reading:
    """Read the prompts of a JSON lines file.

    Args:
        data: the file's bytes; lines end in a newline, a byte-order mark before a line is ignored.
        source: name of the file for messages.
        domain: name of the domain, prefixed to the ids.
        read_messages: how a row becomes a conversation; raises RowError.
        id_fields: where a row's id may stand, first match; a row without one is named by its content.
    Raises:
        DataError: one id stands for two different conversations; both lines are named.
    """
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    prompts: list[Prompt] = []
    rejections: list[Rejection] = []
    seen: dict[str, Prompt] = {}
    blank = 0
    for number, line in enumerate(lines, start=1):
        content = line.removeprefix(BYTE_ORDER_MARK)
        if not content.strip():
            blank += 1
            continue
        name: str | None = None
        try:
            row = _object(content)
            name = _row_id(row, id_fields)
            template = _template(row)
            messages = read_messages(row)
        except RowError as error:
            rejections.append(Rejection(source, number, name, error.category, error.reason, domain))
            continue
        prompt = Prompt(f"{domain}/{name}", domain, template, messages, source, number)
        if name is None:
            prompt = Prompt(f"{domain}/{prompt.identity[:16]}", domain, template, messages, source, number)
        first = seen.setdefault(prompt.id, prompt)
        if first.identity != prompt.identity:
            raise DataError(
                f"{source}:{number}: id {name!r} already stands for another prompt on line {first.line}",
                "give each prompt its own id, or leave the ids out",
            )
        prompts.append(prompt)
    return Reading(prompts, rejections, blank)


def merge_duplicates(
    prompts: Iterable[Prompt], seen: dict[str, Prompt] | None = None
) -> tuple[list[Prompt], list[Rejection]]:
    """Keep the first of all prompts whose normalised conversations are equal.

    Args:
        prompts: in order of precedence.
        seen: identities met before (other domains), extended in place.
    """
    seen = {} if seen is None else seen
    kept: list[Prompt] = []
    rejections: list[Rejection] = []
    for prompt in prompts:
        first = seen.setdefault(prompt.identity, prompt)
        if first is prompt:
            kept.append(prompt)
        else:
            rejections.append(rejection(prompt, "duplicate", f"duplicate of {first.id} ({first.source}:{first.line})"))
    return kept, rejections


def rejection(prompt: Prompt, category: str, reason: str) -> Rejection:
    """The rejection of a prompt that had been read."""
    name = prompt.id.removeprefix(f"{prompt.domain}/")
    return Rejection(prompt.source, prompt.line, name, category, reason, prompt.domain)


def read_prompts(path: Path) -> list[PreparedPrompt]:
    """Read `prompts/<split>.jsonl` as `prepare_prompts` wrote it.

    Raises:
        DataError: missing or damaged; file and line are named.
    """
    result = []
    for number, row in enumerate(read_jsonlines(path), start=1):
        try:
            result.append(PreparedPrompt.model_validate(row))
        except ValidationError as error:
            raise DataError(f"{path}:{number}: {validation_text(error)}", "make it again with `dspark run`") from None
    return result


def _object(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError("encoding", f"not UTF-8 at byte {error.start} of the line") from None
    try:
        row = strict_loads(text)
    except json.JSONDecodeError as error:
        raise RowError("json", f"not valid JSON at column {error.colno}: {error.msg}") from None
    except ValueError as error:  # duplicate key, NaN, Infinity, a number beyond all measure, nesting without end
        raise RowError("json", f"not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise RowError("json", f"must be an object, is {json_type(row)}")
    return row


def _row_id(row: Mapping[str, Any], fields: tuple[str, ...]) -> str | None:
    for field in fields:
        value = row.get(field)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (str, int)) or not str(value).strip():
            raise RowError("id", f"{field}: must be a non-empty string or a whole number, is {json_type(value)}")
        name = str(value)
        check_characters(field, name)
        return name
    return None


def _template(row: Mapping[str, Any]) -> str | None:
    value = row.get("template")
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise RowError("template", f"template: must be a non-empty string, is {json_type(value)}")
    check_characters("template", value)
    return value
