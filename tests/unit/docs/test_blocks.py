"""Every code block of README, docs and examples is tagged, and what it says is accepted by what it calls.

`run` blocks are executed in tests/integration/test_docs.py; options of engines' servers are checked in tests/compat.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import click
import pytest
from blocks import PROGRAMS as TAGGED
from blocks import SHELLS, TAGS, Block, blocks_of, untagged
from pages import PAGES
from shell import CHECKOUT, HEAVY, PROGRAMS, check_dspark, commands

SOURCES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
SOURCES += sorted((CHECKOUT / "examples").rglob("*.md"))
BLOCKS = [block for path in SOURCES for block in blocks_of(path)]
COMMANDS = [(block, words) for block in BLOCKS if block.language in SHELLS for words in commands(block.script)]


def place(block: Block) -> str:
    return f"{block.path.relative_to(CHECKOUT)}:{block.line}"


def test_every_block_has_a_language_and_every_program_a_tag(capsys: pytest.CaptureFixture[str]) -> None:
    for block in BLOCKS:
        assert block.language, f"{place(block)}: say what it is: text, if nothing else"
        if block.language in TAGGED:
            assert block.tag in TAGS, f"{place(block)}: tag it {', '.join(TAGS)}: ```{block.language} check"
        else:
            assert not block.tag, f"{place(block)}: {block.language} is not run, so it has no tag"
    counts = Counter(block.tag or "other" for block in BLOCKS)
    with capsys.disabled():
        print(f"\ncode blocks of {len(SOURCES)} pages:", ", ".join(f"{counts[tag]} {tag}" for tag in (*TAGS, "other")))
    assert counts["run"] >= 8


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in TAGGED], ids=place)
def test_what_a_block_says_is_well_formed(block: Block) -> None:
    if block.language == "python":
        compile(block.text, place(block), "exec")
        return
    assert block.script.strip(), f"{place(block)}: a console shows commands behind `$ `"
    done = subprocess.run(["bash", "-n"], input=block.script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{place(block)}: {done.stderr}"


def accepted(names: set[str], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let each program parse what it is told; returns how many commands of each were."""
    counts: Counter[str] = Counter()
    for block, words in COMMANDS:
        if words[0] not in names:
            continue
        try:
            PROGRAMS[words[0]](words, monkeypatch)
        except (Exception, SystemExit) as reason:
            text = reason.format_message() if isinstance(reason, click.ClickException) else str(reason)
            pytest.fail(f"{place(block)}: {' '.join(words)}\n  {type(reason).__name__}: {text}")
        counts[words[0]] += 1
    return counts


def test_our_own_commands_scripts_targets_and_extras_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = accepted(PROGRAMS.keys() - HEAVY, monkeypatch)
    with capsys.disabled():
        print("\ncommands checked:", ", ".join(f"{count} {name}" for name, count in counts.most_common()))
    assert counts["dspark"] > 50


@pytest.mark.slow
def test_programs_that_are_installed_accept_their_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = accepted(HEAVY, monkeypatch)
    with capsys.disabled():
        print("\ncommands checked:", ", ".join(f"{count} {name}" for name, count in counts.most_common()))
    assert counts.keys() == HEAVY


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("dspark rum --target tiny", "no verb"),
        ("dspark run --tarket tiny", "No such option"),
        ("dspark evaluate --build x --suite paper --only", "requires an argument"),
        ("dspark certify --drafter D --url U", "Missing option"),
        ("dspark package verify", "Missing argument"),
        ("dspark status extra words", "unexpected extra argument"),
        ("dspark promote x --to nowhere", "nowhere"),
    ],
)
def test_a_mistake_in_a_command_would_be_found(line: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [words] = commands(line)
    with pytest.raises(click.UsageError) as caught:
        check_dspark(words, monkeypatch)
    assert wrong in caught.value.format_message()


def test_commands_are_taken_out_of_shell_scripts_as_a_shell_would() -> None:
    script = (
        "export A=b  # a comment; dspark no\n"
        "DSPARK_DEVICE=cpu dspark run \\\n    --target 'a b' 2> log && dspark plan | head -n 1\n"
        "unshare --net sh -c 'ip link set lo up; dspark status'\n"
        "srun /opt/bin/torchrun x.py\n"
    )
    assert list(commands(script)) == [
        ["export", "A=b"],
        ["dspark", "run", "--target", "a b"],
        ["dspark", "plan"],
        ["head", "-n", "1"],
        ["unshare", "--net", "sh", "-c", "ip link set lo up; dspark status"],
        ["ip", "link", "set", "lo", "up"],
        ["dspark", "status"],
        ["torchrun", "x.py"],
    ]


def test_blocks_are_read_as_markdown_means_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "- item\n\n  ```console run\n  $ one \\\n      two\n  said\n  $ three\n  ```\n\n````text\n```\n````\n"
    )
    console, text = blocks_of(page)
    assert (console.language, console.tag, console.line) == ("console", "run", 3)
    assert console.script == "one \\\n    two\nthree\n"
    assert (text.language, text.tag, text.text) == ("text", "", "```\n")
    assert untagged(page.read_text()).splitlines()[2] == "  ```console"
    page.write_text("```bash check\nopen\n")
    with pytest.raises(ValueError, match="not closed"):
        list(blocks_of(page))


@pytest.mark.parametrize("page", SOURCES, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    generated = {(CHECKOUT / "docs" / name).resolve() for name in PAGES}
    for link in re.findall(r"\]\(([^)\s]+)\)", text.replace("]\n(", "](")):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists() or path in generated, f"{page.name}: {link}"
        if anchor and path not in generated:
            assert anchor in anchors(path), f"{page.name}: {link}"


def anchors(path: Path) -> set[str]:
    """What GitHub and mkdocs call the headings of a page."""
    headings: list[Any] = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
