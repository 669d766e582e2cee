"""The command line: one file per verb group, loaded when its verb is called; computes nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `dspark`; ends the process with an exit code of architecture.md, section 7."""
    try:
        from dspark.cli.boundary import run_command

        code = run_command(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:  # the boundary was not there yet, or done already: nothing was begun, nothing is left
        print("stopped", file=sys.stderr)
        code = 130
    raise SystemExit(code)
