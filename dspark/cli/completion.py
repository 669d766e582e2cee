"""`dspark completion`, and what the tab key offers as names of a workspace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from dspark.errors import PreflightError

Complete = Callable[[click.Context, click.Parameter, str], list[str]]

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_DSPARK_COMPLETE"  # click's own name for it


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what makes the tab key complete verbs, options, targets and builds.

    \b
    bash    dspark completion bash > ~/.local/share/bash-completion/completions/dspark
    zsh     dspark completion zsh > ~/.zfunc/_dspark
    fish    dspark completion fish > ~/.config/fish/completions/dspark.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None  # one of click's own three
    click.echo(kind(context.find_root().command, {}, "dspark", VARIABLE).source())


def names_of(*words: str) -> Complete:
    """Completes names that the workspace declares, of any of these words (`target`, `build`, `serving profile`)."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        from dspark.config.names import FOLDERS, declared_names

        root = _root(context)
        found = {name for word in words for name in declared_names(root / FOLDERS[word])} if root else set()
        return sorted(name for name in found if name.startswith(incomplete))

    return complete


def stage_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Completes stages that have a log in some run."""
    root = _root(context)
    logs = root.glob(".dspark/runs/*/*@*.log") if root else ()
    found = {path.name.removesuffix(".log") for path in logs}
    return sorted(name for name in found if name.startswith(incomplete))


def _root(context: click.Context) -> Path | None:
    """The workspace that the command line so far is about; None: there is none, and nothing to offer."""
    from dspark.workspace.layout import find_workspace

    try:
        return find_workspace(context.find_root().params.get("workspace")).root
    except PreflightError:
        return None
