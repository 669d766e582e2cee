"""What to do about a command line that click refused: it names the mistake, the way on is said here."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from dspark.cli.root import root

_REHEARSALS = ("--dry-run", "--dryrun", "--dry", "--simulate")  # what other programs call `dspark plan`


def way_on(error: click.UsageError, arguments: Sequence[str]) -> str:
    """The next command after a mistake in the words of a command line.

    Args:
        error: click's; one of ours that names the way on itself, in a line of its own, needs no other.
        arguments: the command line without `dspark`.
    """
    if "\n  " in error.format_message():
        return ""
    path, command = _asked_for(arguments)
    manual = f"see {path} --help"
    options = {name for parameter in command.params for name in parameter.opts}
    if extra := re.fullmatch(r"Got unexpected extra argument \((\S+)\)", error.format_message()):
        named = next((option for option in ("--target", "--build") if option in options), None)
        return f"did you mean {path} {named} {extra[1]}?  {manual}" if named else manual
    if isinstance(error, click.NoSuchOption) and error.option_name in _REHEARSALS and "--build" in options:
        return f"what a run would do: dspark plan --target NAME;  {manual}"
    return manual


def _asked_for(arguments: Sequence[str]) -> tuple[str, click.Command]:
    """The verb that a command line is about, as far as it is one: its words, and the command."""
    words = ["dspark"]
    command: click.Command = root
    for word in arguments:
        if not isinstance(command, click.Group):
            break
        with click.Context(command, resilient_parsing=True) as context:
            found = command.get_command(context, word)
        if found is not None:
            words.append(word)
            command = found
    return " ".join(words), command
