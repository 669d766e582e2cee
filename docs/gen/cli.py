"""`reference/cli.md`: every verb and every option, as click knows them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from dspark.cli.root import root

_HEAD = """# Command line

Made from the command line itself when the site is built; `dspark VERB --help` says the same.
Results go to stdout, logs and progress to stderr. `--json` prints one document.

| exit code | |
|---|---|
| 0 | done |
| 2 | usage or settings |
| 3 | workspace or preflight |
| 4 | data |
| 5 | a stage failed |
| 6 | a gate refused, or a certificate is stale |
| 7 | integrity: a digest, a signature, a file of a package |
| 8 | a service cannot be reached |
| 9 | drift |
| 130 | interrupted; the same command goes on from there |
"""


def page() -> str:
    """The whole page."""
    context = click.Context(root, info_name="dspark", **root.context_settings)
    return "\n".join([_HEAD, *_sections(root, context, 2)])


def _sections(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    yield f"{'#' * level} `{context.command_path}`\n"
    yield _prose(command.help or "")
    yield f"```text\n{' '.join([context.command_path, *command.collect_usage_pieces(context)])}\n```\n"
    rows = [_row(parameter, context) for parameter in command.get_params(context) if not _hidden(parameter)]
    if rows:
        yield "\n".join(["| | |", "|---|---|", *rows]) + "\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                inner = click.Context(below, info_name=name, parent=context)
                yield from _sections(below, inner, 2 if level == 2 and context.parent is None else min(level + 1, 4))


def _prose(text: str) -> str:
    """Help text as Markdown; what click must not wrap (paragraphs behind a backspace) is shown as it is typed."""
    shown = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b"):
            shown.append("```text\n" + paragraph.removeprefix("\b").strip("\n") + "\n```")
        else:
            shown.append(_escaped(" ".join(paragraph.split())))
    return "\n\n".join(shown) + "\n"


def _row(parameter: click.Parameter, context: click.Context) -> str:
    if isinstance(parameter, click.Option):
        record = parameter.get_help_record(context)
        names, text = record if record is not None else (", ".join(parameter.opts), "")
    else:
        names = parameter.make_metavar(context)
        text = "required" if parameter.required else "may be left out"
    return f"| `{names}` | {_escaped(' '.join(text.split()))} |"


def _hidden(parameter: click.Parameter) -> bool:
    return bool(getattr(parameter, "hidden", False))


def _escaped(text: str) -> str:
    """Placeholders such as <name> and pipes would be read as HTML and as the end of a cell."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")
