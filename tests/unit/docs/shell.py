"""Shell scripts of the documentation, command by command, and what the programs that they call make of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_WRAPPERS = {"srun", "exec", "nice", "time"}


def commands(script: str) -> Iterator[list[str]]:
    """The words of every simple command: no assignments in front, no redirections, no comments."""
    for line in script.replace("\\\n", " ").splitlines():
        words: list[str] = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        tokens = iter(lexer)
        for token in tokens:
            if not set(token) <= set("();<>|&"):
                words.append(token)
            elif token[0] in "<>":
                if words and words[-1].isdigit():
                    words.pop()  # the number of what is redirected
                next(tokens, None)
            else:
                yield from _command(words)
                words = []
        yield from _command(words)


def _command(words: list[str]) -> Iterator[list[str]]:
    while words and (_ASSIGNMENT.fullmatch(words[0]) or words[0] in _WRAPPERS):
        words = words[1:]
    if not words:
        return
    yield [Path(words[0]).name, *words[1:]]
    if "-c" in words[:-1] and {"sh", "bash"} & {*words}:
        yield from commands(words[words.index("-c") + 1])


def check_click(group: click.Command, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command line as click would, without calling anything; files that it names need not be there.

    Raises:
        click.UsageError: an unknown verb or option, a value that an option does not take, too many arguments, or few.
    """
    monkeypatch.setattr(click.Path, "convert", lambda self, value, parameter, context: value)
    command, arguments, name = group, words[1:], words[0]
    context = click.Context(command, info_name=name)
    while isinstance(command, click.Group):
        found, below, arguments = command.resolve_command(context, arguments)
        assert below is not None and found is not None, f"{context.command_path} {arguments}"
        command, name = below, found
        if isinstance(command, click.Group):
            context = click.Context(command, info_name=name, parent=context)
    command.make_context(name, list(arguments), parent=context)


def check_dspark(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from dspark.cli.root import root

    check_click(root, words, monkeypatch)


def check_mlflow(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.cli import cli

    check_click(cli, words, monkeypatch)


def check_dvc(words: list[str], _: Any) -> None:
    from dvc.cli.parser import get_main_parser

    get_main_parser().parse_args(words[1:])


def check_accelerate(words: list[str], _: Any) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert words[1] == "launch"
    check_python(["python", *launched(launch_command_parser(), words[2:])], _)


def check_torchrun(words: list[str], _: Any) -> None:
    from torch.distributed.run import get_args_parser

    check_python(["python", *launched(get_args_parser(), words[1:])], _)


def launched(parser: Any, words: list[str]) -> list[str]:
    arguments = parser.parse_args(words)
    return [arguments.training_script, *arguments.training_script_args]


def check_python(words: list[str], _: Any) -> None:
    """A script of ours is there, and knows the options that it is given."""
    if len(words) < 2 or not words[1].endswith(".py"):
        return
    # A name alone is that of an example, copied to a machine without a checkout.
    found = [CHECKOUT / words[1], *((CHECKOUT / "examples").glob(f"*/{words[1]}") if "/" not in words[1] else ())]
    script = next((path for path in found if path.is_file()), None)
    assert script is not None, f"there is no {words[1]}"
    source = script.read_text(encoding="utf-8")
    for word in words[2:]:
        if word.startswith("--"):
            assert f'"{word.partition("=")[0]}"' in source, f"{words[1]} has no {word}"


def check_make(words: list[str], _: Any) -> None:
    targets = re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE)
    assert {*words[1:]} <= {*targets}, words


def check_pip(words: list[str], _: Any) -> None:
    """Extras of ours are declared."""
    import tomllib

    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    for word in words:
        if match := re.match(r"dspark\[([a-z0-9,]+)\]", word):
            assert {*match[1].split(",")} <= project["optional-dependencies"].keys(), word


PROGRAMS: dict[str, Callable[[list[str], Any], None]] = {
    "dspark": check_dspark,
    "python": check_python,
    "make": check_make,
    "pip": check_pip,
    "dvc": check_dvc,
    "mlflow": check_mlflow,
    "accelerate": check_accelerate,
    "torchrun": check_torchrun,
}
HEAVY = {"dvc", "mlflow", "accelerate", "torchrun"}  # programs whose parsers take seconds to load
