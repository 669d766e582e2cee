"""Prompts from templates: a text with named gaps, and for each gap what it may be filled with.

    variants: 8                       # prompts drawn from each template that has gaps
    lists:
      names: [Ada, Ben, Chloe]
    templates:
      - id: shop-total                # the unit of splitting
        text: "{name} buys {n} pens at {price} dollars each. What does {name} pay?"
        values:
          name: from names            # of a list, each at most once in a prompt
          n: 3..12                    # a number of a range, ends included; also `10..90 step 5`, `0.5..4 step 0.25`
          price: [2, 3, 5]            # one of these
          paid: n * price             # a product, sum or difference of two values or numbers

`text` may be a list of phrasings; the variants take them in turn, and a template without gaps gives each phrasing
once. Draws depend on the template's id and the number of the variant only, so other templates change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple, TypeAlias

from pydantic import Field, ValidationError

from dspark.config.models import Name, Settings
from dspark.corpus.shapes import RowError, text_of
from dspark.corpus.splits import hash_position
from dspark.errors import SettingsError
from dspark.io.jsonfile import validation_text
from dspark.io.yamlfile import read_yaml

GAP = re.compile(r"\{([a-z][a-z0-9_]*)\}")
_NUMBER = r"-?\d+(?:\.\d+)?"
RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?: step (\d+(?:\.\d+)?))?")
DERIVED = re.compile(rf"([a-z][a-z0-9_]*|{_NUMBER}) ([*+-]) ([a-z][a-z0-9_]*|{_NUMBER})")
# Draws of one variant before it is taken that the template has no further one.
ATTEMPTS = 40

Choice: TypeAlias = str | int | float
OPERATIONS: dict[str, Callable[[Decimal, Decimal], Decimal]] = {
    "*": lambda a, b: a * b,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
}


class Template(Settings):
    """One template of a file."""

    id: Name
    text: str | list[str] = Field(min_length=1)
    values: dict[str, str | list[Choice]] = Field(default_factory=dict)
    variants: int | None = Field(default=None, gt=0)  # None: the file's

    @property
    def texts(self) -> list[str]:
        """The phrasings."""
        texts = [self.text] if isinstance(self.text, str) else self.text
        return [text.strip() for text in texts]


class TemplateFile(Settings):
    """A whole file of templates."""

    variants: int = Field(default=8, gt=0)
    lists: dict[str, list[Choice]] = Field(default_factory=dict)
    templates: list[Template] = Field(min_length=1)


class TemplatedText(NamedTuple):
    """A prompt's text, the template and the number of the variant it came from, and the template's line."""

    template: str
    variant: int
    text: str
    line: int


def read_templates(path: Path) -> list[TemplatedText]:
    """All prompts of a file of templates, in its order.

    Raises:
        SettingsError: not YAML, unknown keys, a gap without a value, a value without a gap, an unknown list, a range
            that is empty, two templates of one id; file and line are named.
    """
    value = read_yaml(path)
    lines = _lines(path)
    try:
        file = TemplateFile.model_validate(value)
    except ValidationError as error:
        raise SettingsError(f"{path}: {validation_text(error)}") from None
    result: list[TemplatedText] = []
    seen: set[str] = set()
    for template in file.templates:
        places = lines.get(template.id, [1])
        line = places[0]
        if template.id in seen:
            raise SettingsError(
                f"{path}:{places[-1]}: template {template.id!r} already stands on line {line}", "give each its own id"
            )
        seen.add(template.id)
        try:
            texts = [text_of("text", text) for text in _draw(template, file)]
        except (ValueError, RowError) as error:
            raise SettingsError(f"{path}:{line}: template {template.id!r}: {error}") from None
        result.extend(TemplatedText(template.id, index, text, line) for index, text in enumerate(texts))
    return result


def _draw(template: Template, file: TemplateFile) -> Iterator[str]:
    _check_gaps(template, file)
    if not template.values:
        yield from template.texts
        return
    seen: set[str] = set()
    for variant in range(template.variants or file.variants):
        text = template.texts[variant % len(template.texts)]
        for attempt in range(ATTEMPTS):
            filled = _fill(text, _values(template, file, f"{template.id}/{variant}/{attempt}"))
            if filled not in seen:
                seen.add(filled)
                yield filled
                break


def _check_gaps(template: Template, file: TemplateFile) -> None:
    used = {name for text in template.texts for name in GAP.findall(text)}
    missing = sorted(used - template.values.keys())
    if missing:
        raise ValueError(f"no value for {', '.join(missing)}")
    known: set[str] = set()
    for name, value in template.values.items():
        if isinstance(value, str) and (match := DERIVED.fullmatch(value)):
            operands = {part for part in (match[1], match[3]) if not re.fullmatch(_NUMBER, part)}
            unknown = sorted(operands - known)
            if unknown:
                raise ValueError(f"{name}: {', '.join(unknown)} must stand above it")
            used |= operands
        elif not _choices(name, value, file):
            raise ValueError(f"{name}: nothing to choose from")
        known.add(name)
    unused = sorted(known - used)
    if unused:
        raise ValueError(f"{', '.join(unused)} is never used")


def _values(template: Template, file: TemplateFile, key: str) -> dict[str, Choice | Decimal]:
    """Draw all values of a template; `key` names the draw."""
    result: dict[str, Choice | Decimal] = {}
    taken: dict[str, set[Choice | Decimal]] = {}
    for name, value in template.values.items():
        if isinstance(value, str) and (match := DERIVED.fullmatch(value)):
            result[name] = OPERATIONS[match[2]](_operand(match[1], result), _operand(match[3], result))
            continue
        choices = _choices(name, value, file)
        if isinstance(value, str) and value.startswith("from "):
            used = taken.setdefault(value, set())
            choices = [choice for choice in choices if choice not in used] or choices
            result[name] = choices[int(hash_position(f"{key}/{name}", 0) * len(choices))]
            used.add(result[name])
        else:
            result[name] = choices[int(hash_position(f"{key}/{name}", 0) * len(choices))]
    return result


def _choices(name: str, value: str | list[Choice], file: TemplateFile) -> list[Choice | Decimal]:
    """What a value may be, derived ones excepted."""
    if isinstance(value, list):
        return list(value)
    if value.startswith("from "):
        key = value.removeprefix("from ").strip()
        if key not in file.lists:
            raise ValueError(f"{name}: there is no list {key!r}")
        return list(file.lists[key])
    match = RANGE.fullmatch(value)
    if match is None:
        raise ValueError(f"{name}: {value!r} is no range, no list, no `from <list>` and no product, sum or difference")
    low, high, step = Decimal(match[1]), Decimal(match[2]), Decimal(match[3] or 1)
    if step == 0:
        raise ValueError(f"{name}: the step is 0")
    return [low + step * index for index in range(int((high - low) / step) + 1)] if high >= low else []


def _operand(part: str, values: dict[str, Choice | Decimal]) -> Decimal:
    value = values.get(part, part)
    try:
        return Decimal(str(value))
    except ArithmeticError:
        raise ValueError(f"{part} is {value!r}, which is not a number") from None


def _fill(text: str, values: dict[str, Choice | Decimal]) -> str:
    # One pass, so that a value that looks like a gap stays text.
    return GAP.sub(lambda match: str(values[match[1]]), text)


def _lines(path: Path) -> dict[str, list[int]]:
    """The lines on which each id stands, for messages."""
    result: dict[str, list[int]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if match := re.match(r"[\s{-]*id: *[\"']?([^\s\"'#,}]+)", line):
            result.setdefault(match[1], []).append(number)
    return result
