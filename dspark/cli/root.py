"""The group of all verbs. Importing it loads click and nothing else: `dspark --help` answers at once."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

# verb: (module, attribute, what `--help` says). The text stands here so that no module is loaded to show it.
VERBS: dict[str, tuple[str, str, str]] = {
    "init": ("dspark.cli.init", "init", "Write the files of a workspace, or what a newer dspark changed in them"),
    "run": ("dspark.cli.run", "run", "Make the package of a target or build and register it"),
    "retrain": ("dspark.cli.retrain", "retrain", "Train on from the champion for a new domain"),
    "plan": ("dspark.cli.plan", "plan", "Show what a run would do, and what it would take"),
    "status": ("dspark.cli.status", "status", "Show how the newest run stands, from any terminal"),
    "logs": ("dspark.cli.logs", "logs", "Print or follow what a stage printed"),
    "dag": ("dspark.cli.dag", "dag", "Show the stages and what each reads, as text, mermaid or dot"),
    "targets": ("dspark.cli.targets", "targets", "List, show, add, fetch and export targets"),
    "overfit": ("dspark.cli.overfit", "overfit", "Let a drafter learn a handful of answers: a new target's first test"),
    "import": ("dspark.cli.import_drafter", "import_drafter", "Take a released drafter into a build without training"),
    "evaluate": ("dspark.cli.evaluate", "evaluate", "A finished build on benchmark sets, or builds in a study"),
    "live": ("dspark.cli.live", "live", "Replay a rising and falling load under every policy"),
    "certify": ("dspark.cli.certify", "certify", "Certify an existing drafter on a running server"),
    "store": ("dspark.cli.store", "store", "What lies in the stores; remove what nothing names, find damage"),
    "profiles": ("dspark.cli.profiles", "profiles", "List and show serving profiles"),
    "report": ("dspark.cli.report", "report", "Tell what a build or package is worth, for a browser or for CI"),
    "plots": ("dspark.cli.plots", "plots", "Draw what a build has measured, as SVG and CSV"),
    "package": ("dspark.cli.package", "package", "Fetch, verify, sign, try and show packages"),
    "registry": ("dspark.cli.registry", "registry", "What is registered, who held which stage; deliver what waits"),
    "remote": ("dspark.cli.remote", "remote", "Share what stages made, through DVC's remote"),
    "promote": ("dspark.cli.promote", "promote", "Promote a registered version through the gates"),
    "rollback": ("dspark.cli.promote", "rollback", "Let what held a stage before hold it again"),
    "drift": ("dspark.cli.drift", "drift", "Hold a server's live acceptance against a certificate"),
    "config": ("dspark.cli.config", "config", "Show every setting of a build, and where it comes from"),
    "doctor": ("dspark.cli.doctor", "doctor", "Find what is wrong here and what mends it"),
    "version": ("dspark.cli.version", "version", "Show versions"),
    "completion": ("dspark.cli.completion", "completion", "Print what the shell needs to complete by the tab key"),
}


class Verbs(click.Group):
    """Loads a verb when it is called, and suggests the one that was probably meant."""

    def list_commands(self, context: click.Context) -> list[str]:
        """All verbs, in the order of the table."""
        return list(VERBS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Load one verb."""
        if name not in VERBS:
            return None
        module, attribute, _ = VERBS[name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of verbs, from the table alone."""
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, _, text) in VERBS.items()])

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb, or suggest one; `dspark verify` for `dspark package verify` is a frequent slip."""
        name = arguments[0]
        known = name in VERBS or context.resilient_parsing
        inside = [] if known else self._groups_with(context, name)
        suggest(context, name, VERBS, inside)
        return super().resolve_command(context, arguments)

    def _groups_with(self, context: click.Context, name: str) -> list[str]:
        """Whole commands that end in a word that is no verb by itself; loads every verb."""
        found = ((verb, self.get_command(context, verb)) for verb in VERBS)
        return [
            f"dspark {verb} {name}"
            for verb, group in found
            if isinstance(group, click.Group) and name in group.commands
        ]


class Subverbs(click.Group):
    """A verb with verbs of its own."""

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb, or suggest one."""
        suggest(context, arguments[0], self.commands)
        return super().resolve_command(context, arguments)


def suggest(context: click.Context, name: str, known: Iterable[str], inside: Sequence[str] = ()) -> None:
    """Refuse an unknown verb with the nearest known one.

    Args:
        known: verbs of the group.
        inside: whole commands that probably were meant.
    Raises:
        UsageError: `name` is no verb of the group.
    """
    if name in known or name.startswith("-") or context.resilient_parsing:  # the last: the tab key
        return
    near = inside or difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?  " if near else ""
    raise click.UsageError(
        f"{context.command_path} has no verb {name!r}\n  {hint}all verbs: {context.command_path} --help"
    )


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    subcommand_metavar="VERB ...",
    options_metavar="[--workspace DIR] [--debug]",
)
@click.option(
    "--workspace",
    "-C",
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder inside the workspace (default: the current one).",
)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def root(context: click.Context, workspace: Path | None, debug: bool) -> None:
    """Turn a language model and some prompts into a tested drafter package for speculative decoding.

    \b
    dspark init my-workspace            the files to edit and to version
    dspark run --target tiny            the whole pipeline in about two minutes
    dspark run --target smollm2-135m    a real model on two CPU cores
    """
    context.obj = {"workspace": workspace, "debug": debug}
