"""`dspark version`."""

from __future__ import annotations

import click

from dspark.cli.options import as_json, print_json, print_table


@click.command()
@as_json
def version(json_output: bool) -> None:
    """Versions of dspark and of the libraries it works with; nothing is imported to find them."""
    from dspark.workspace.versions import versions

    found = versions()
    if json_output:
        print_json({"schema": "dspark/version/1", **found})
    else:
        print_table(list(found.items()))
