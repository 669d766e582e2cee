"""SVG as text: elements, escaped text, numbers of one spelling. Equal values give equal bytes."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

Attribute = str | float | int | None

# What XML 1.0 allows in a document, line ends and tabs apart: those are blanks here.
_FORBIDDEN = re.compile("[^\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_BLANKS = re.compile(r"[\t\n\r\x85\u2028\u2029]+")


def number(value: float) -> str:
    """A coordinate: two decimals at most, no trailing zeros, no minus zero."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def escaped(text: object) -> str:
    """Text for an element or a quoted attribute, in one line; what XML cannot hold becomes U+FFFD."""
    clean = _FORBIDDEN.sub("\ufffd", _BLANKS.sub(" ", str(text)))
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        clean = clean.replace(character, entity)
    return clean


def element(name: str, attributes: Mapping[str, Attribute], *children: str) -> str:
    """An element in the order of its attributes; those that are None are left out.

    Args:
        attributes: names as in SVG; numbers are coordinates, texts are escaped.
        children: markup; text goes through `escaped` first.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            parts.append(f'{key}="{escaped(value) if isinstance(value, str) else number(value)}"')
    opening = " ".join(parts)
    return f"<{opening}>{''.join(children)}</{name}>" if children else f"<{opening}/>"


def text_width(text: str, size: float) -> float:
    """About how wide a text is in a sans serif font of `size`: no font is there to ask."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return size * (0.56 * (len(text) - wide) + 1.02 * wide)


def shortened(text: str, size: float, width: float) -> str:
    """The text, or as much of its beginning as fits into `width` with an ellipsis."""
    if text_width(text, size) <= width:
        return text
    kept = text
    while kept and text_width(f"{kept}…", size) > width:
        kept = kept[:-1]
    return f"{kept.rstrip()}…"


def wrapped(text: str, size: float, width: float) -> list[str]:
    """The text in lines that fit into `width`, broken at blanks; a longer word is shortened."""
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] = f"{lines[-1]} {word}"
        else:
            lines.append(shortened(word, size, width))
    return lines
