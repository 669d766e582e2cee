"""Where errors become text and exit codes, and nowhere else."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence

import click

from dspark.cli.root import root
from dspark.cli.usage import way_on
from dspark.errors import DsparkError, Interrupted
from dspark.io.disk import disk_error

USAGE, FAULT, INTERRUPTED = 2, 1, 130


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    debug = "--debug" in arguments or bool(os.environ.get("DSPARK_DEBUG"))
    as_json = "--json" in arguments
    try:
        code = root.main(list(arguments), prog_name="dspark", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except BrokenPipeError:
        _give_up_stdout()  # whoever read it has enough
        return 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:  # its message is the help of a verb that has verbs
        print(error.format_message(), file=sys.stderr)
        return USAGE
    except click.ClickException as error:
        hint = way_on(error, arguments) if isinstance(error, click.UsageError) else ""
        message = error.format_message().replace("\n\t", " ")  # where click lists choices, one a line
        return _report(message, hint, USAGE, as_json)
    except DsparkError as error:
        if debug:
            _traceback()
        return _report(error.message, error.hint, error.exit_code, as_json)
    except (Interrupted, KeyboardInterrupt, click.Abort) as stop:
        hint = stop.hint if isinstance(stop, Interrupted) else Interrupted().hint
        return _report(str(stop) or "stopped", hint, INTERRUPTED, as_json)
    except Exception as fault:
        if debug:
            _traceback()
        if known := disk_error(fault):
            return _report(known.message, known.hint, known.exit_code, as_json)
        hint = "this is a fault in dspark: please report it; `dspark --debug VERB ...` shows where"
        return _report(f"{type(fault).__name__}: {fault}", hint, FAULT, as_json)


def _report(message: str, hint: str, code: int, as_json: bool) -> int:
    lines = [f"Error: {message}" if code != INTERRUPTED else message]
    lines += [f"  {line}" for line in hint.splitlines()]
    with contextlib.suppress(OSError):  # nobody reads it any more
        print("\n".join(lines), file=sys.stderr, flush=True)
    try:
        if as_json:
            print(json.dumps({"schema": "dspark/error/1", "error": message, "hint": hint, "exit_code": code}))
        sys.stdout.flush()
    except OSError:  # it lies on the very disk that is full
        _give_up_stdout()
    return code


def _give_up_stdout() -> None:
    """Python would try to write what is left, and complain again, while it closes stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _traceback() -> None:
    import traceback

    traceback.print_exc()
