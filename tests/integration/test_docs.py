"""Every `run` block of the documentation is executed, in the order of the pages, in one workspace with target tiny.

The tutorial makes the package that the other pages read. Blocks of a page share nothing but the workspace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "gen"))  # blocks.py

from blocks import Block, blocks_of

if TYPE_CHECKING:
    from sandbox import Sandbox

CHECKOUT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.long
PAGES = [CHECKOUT / "docs/tutorial.md", CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
PAGES += sorted((CHECKOUT / "examples").rglob("*.md"))
RUN = [block for path in dict.fromkeys(PAGES) for block in blocks_of(path) if block.tag == "run"]
STOPS_AT_THE_FIRST_FAILURE = "set -euo pipefail\n"


@pytest.fixture(scope="module")
def place(new_sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """A workspace like a checkout's: the examples lie in it, and `dspark` and `python` are on the path."""
    shutil.copytree(CHECKOUT / "examples", new_sandbox.root / "examples")
    programs = tmp_path_factory.mktemp("bin")
    for name, words in {"dspark": "-m dspark", "python": ""}.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        program.chmod(0o755)
    new_sandbox.path = f"{programs}{os.pathsep}{os.environ['PATH']}"  # type: ignore[attr-defined]
    yield new_sandbox


def execute(place: Sandbox, block: Block) -> subprocess.CompletedProcess[str]:
    command = ["python", "-"] if block.language == "python" else ["bash", "-s"]
    return subprocess.run(
        command,
        input=block.text if block.language == "python" else STOPS_AT_THE_FIRST_FAILURE + block.script,
        cwd=place.root,
        env=place.environment(PATH=place.path),  # type: ignore[attr-defined]
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("block", RUN, ids=lambda block: f"{block.path.relative_to(CHECKOUT)}:{block.line}")
def test_a_block_that_says_run_runs(block: Block, place: Sandbox) -> None:
    done = execute(place, block)
    assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr


def test_the_tutorial_leaves_what_it_says(place: Sandbox) -> None:
    """It says that the certificate of a drafter on random weights advises to serve without one."""
    from dspark import load_package

    package = load_package(place.root / "builds/tiny/package")
    advice = package.recommended(1)
    assert advice is not None and advice.policy == "none"
    assert (place.root / "builds/tiny/plots/plots.json").is_file()


def test_the_chat_says_what_the_target_says_without_drafts(place: Sandbox) -> None:
    """At temperature 0 the loop is lossless, so plain decoding of the same prompt is the expected text."""
    from dspark import decode, load_target, read_record

    words = ["python", "examples/chat/chat.py", "--package", "builds/tiny/package", "--new-tokens", "24"]
    done = subprocess.run(
        [*words, "--say", "How are you?"],
        cwd=place.root,
        env=place.environment(PATH=place.path),  # type: ignore[attr-defined]
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    target = load_target(read_record(place.root / "targets/tiny.json"), place.root)
    prompt = target.template.encode_chat([{"role": "user", "content": "How are you?"}])
    [plain] = decode(target, None, [prompt], max_new_tokens=24)
    assert done.stdout == target.tokenizer.decode(plain.token_ids, skip_special_tokens=True) + "\n"
    assert "steps, tau" in done.stderr
