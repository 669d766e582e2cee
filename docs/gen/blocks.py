"""Code blocks of a Markdown file and their tags: the second word of a fence's info string.

    ```console run      executed by the tests, in a workspace with target tiny
    ```bash check       parsed: the shell's syntax, our own options, those of programs that are installed
    ```bash gpu         parsed like `check`; to be run needs a GPU, a server or a service that the tests do not have

GitHub and mkdocs take the first word for the language; the site drops the second (`hooks.py`).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TAGS = ("run", "check", "gpu")
SHELLS = ("console", "bash", "sh")
PROGRAMS = (*SHELLS, "python")  # a block in one of these says what to do, so it has a tag
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>[^`\n]*)$")


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is that of its opening fence, counted from 1."""

    path: Path
    line: int
    language: str
    tag: str
    text: str

    @property
    def script(self) -> str:
        """What is typed: of a console the lines behind `$ `, with their continuations; of others everything."""
        if self.language != "console":
            return self.text
        lines, goes_on = [], False
        for line in self.text.splitlines():
            if line.startswith("$ ") or goes_on:
                lines.append(line if goes_on else line[2:])
                goes_on = line.endswith("\\")
        return "\n".join(lines) + "\n"


def blocks_of(path: Path) -> Iterator[Block]:
    """Every fenced block of a file.

    Raises:
        ValueError: a fence that is not closed.
    """
    opened: tuple[int, str, str, str] | None = None
    inside: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = _FENCE.match(line)
        if opened is None and match:
            opened, inside = (number, match["indent"], match["fence"], match["info"].strip()), []
        elif opened is not None and match and match["fence"].startswith(opened[2]) and not match["info"].strip():
            language, _, tag = opened[3].partition(" ")
            yield Block(path, opened[0], language, tag.strip(), textwrap.dedent("\n".join(inside)) + "\n")
            opened = None
        elif opened is not None:
            inside.append(line)
    if opened is not None:
        raise ValueError(f"{path}:{opened[0]}: the block is not closed")


def untagged(markdown: str) -> str:
    """A page with its fences' tags left out."""
    tags = "|".join(TAGS)
    return re.sub(rf"^( *[`~]{{3,}}[a-z]+) (?:{tags})$", r"\1", markdown, flags=re.MULTILINE)
