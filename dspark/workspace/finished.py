"""Copies of finished outputs, kept until DVC has recorded them: a kill in between costs nothing.

`.dspark/work/<stage>/<input digest>/finished/`: the output under its own name, and `digest`, which tells whether it is
still what the stage had made.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from dspark.io.atomic import write_text
from dspark.io.digest import digest_tree

FOLDER = "finished"
_DIGEST = "digest"


def keep(output: Path, folder: Path) -> None:
    """Keep a copy of a finished output in `folder`, which appears when the copy is complete.

    Raises:
        OSError: the disk does not take it.
    """
    unfinished = folder.with_name(folder.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        copy(output, unfinished / output.name)
        write_text(unfinished / _DIGEST, digest_tree(output))
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)  # it would only fill the disk
        raise
    unfinished.replace(folder)


def intact(folder: Path, name: str) -> bool:
    """True if a copy is there, byte by byte as the output was."""
    try:
        return digest_tree(folder / name) == (folder / _DIGEST).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def copy(source: Path, destination: Path) -> None:
    """Copy a file or folder; no hard links, which a package must not have."""
    if source.is_dir():
        shutil.copytree(source, destination)
    else:
        shutil.copy2(source, destination)
