"""The command line: one file per verb group, loaded when its verb is called; computes nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `dspark`; ends the process with an exit code of architecture.md, section 7."""
    from dspark.cli.boundary import run_command

    raise SystemExit(run_command(list(sys.argv[1:] if arguments is None else arguments)))
