"""What mkdocs calls while it builds the site: reference pages made from the code, and the tags of code blocks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import blocks
import pages


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages; nothing of them is written below docs/."""
    from mkdocs.structure.files import File

    for path, make in pages.PAGES.items():
        files.append(File.generated(config, path, content=make()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Take `run`, `check` and `gpu` from the info strings: they are for the tests, and for whoever reads the source."""
    return blocks.untagged(markdown)
