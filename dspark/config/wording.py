"""What is wrong with a value, in our words: pydantic's name its own types and patterns, which no user has asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import ErrorDetails

from dspark.config.models import ADDRESS_PATTERN, DIGEST_PATTERN, NAME_PATTERN, VERSION_RANGE

_PATTERNS = {
    NAME_PATTERN: "must be a name of a-z, 0-9, '.', '_' and '-'",
    DIGEST_PATTERN: "must be a SHA-256 digest, 64 hexadecimal digits",
    VERSION_RANGE: "must be a range of versions, such as >=0.5.23,<0.6",
    ADDRESS_PATTERN: "must be an address, such as http://127.0.0.1:30000",
}


def _number(sign: str, key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda context: f"must be {sign} {context[key]:g}"


def _always(text: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda context: text


_KINDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than": _number(">", "gt"),
    "greater_than_equal": _number("at least", "ge"),
    "less_than": _number("<", "lt"),
    "less_than_equal": _number("at most", "le"),
    "literal_error": lambda context: f"must be {_listed(context['expected'])}",
    "string_pattern_mismatch": lambda context: _PATTERNS.get(context["pattern"], "has another form than it must have"),
    "too_short": lambda context: f"must hold at least {context['min_length']}, it holds {context['actual_length']}",
    "too_long": lambda context: f"must hold at most {context['max_length']}, it holds {context['actual_length']}",
    "union_tag_not_found": lambda context: f"needs a {context['discriminator'].strip(chr(39))}",
    "union_tag_invalid": lambda context: (
        f"{context['discriminator'].strip(chr(39))} must be {_listed(context['expected_tags'])}, not {context['tag']!r}"
    ),
    "finite_number": _always("must be a finite number"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), _always("must be a whole number")),
    **dict.fromkeys(("float_type", "float_parsing"), _always("must be a number")),
    **dict.fromkeys(("bool_type", "bool_parsing"), _always("must be true or false")),
    **dict.fromkeys(("string_type",), _always("must be text")),
    **dict.fromkeys(("tuple_type", "list_type"), _always("expected a list")),
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type", "dataclass_type"), _always("expected `key: value` lines")
    ),
}


def wording(item: ErrorDetails) -> str:
    """What a pydantic error says, without the value; a validator's own words stand as they are."""
    kind = _KINDS.get(item["type"])
    if kind is not None:
        return kind(item.get("ctx") or {})
    text = item["msg"].removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def options_of(item: ErrorDetails) -> list[str]:
    """The values that a key may have, where a mistake is about one of a few."""
    return re.findall(r"'([^']*)'", item["ctx"]["expected"]) if item["type"] == "literal_error" else []


def _listed(expected: str) -> str:
    """pydantic's `'a', 'b' or 'c'` without quotation marks."""
    return expected.replace("'", "")
