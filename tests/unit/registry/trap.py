"""Runs one `dspark` command line as its console script would, and dies at once if anything of a package would run.

Started as `python trap.py FOLDER ARGUMENTS...`: what lies below FOLDER must not be imported or executed, nothing may be
unpickled, and no process may start. Python's own audit events tell, whatever library is behind them.
"""

from __future__ import annotations

import os
import sys

FORBIDDEN = ("pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "pty.spawn")
SPRUNG = 99


def arm(folder: str) -> None:
    inside = os.path.realpath(folder) + os.sep

    def below(path: object) -> bool:
        return isinstance(path, str) and not path.startswith("<") and os.path.realpath(path).startswith(inside)

    def hook(event: str, arguments: tuple) -> None:
        caught = event in FORBIDDEN
        if event in ("exec", "compile"):
            caught = below(getattr(arguments[0], "co_filename", arguments[-1]))
        elif event == "import":
            caught = below(arguments[1])
        elif event in ("ctypes.dlopen", "sys.addaudithook"):
            caught = below(arguments[0] if arguments else None)
        if caught:
            os.write(2, f"the trap was sprung by {event} {arguments!r}\n".encode())
            os._exit(SPRUNG)

    sys.addaudithook(hook)


if __name__ == "__main__":
    arm(sys.argv[1])
    if sys.argv[2] == "exec":  # control: what the trap is there to notice
        exec(sys.argv[3])
    else:
        from dspark.cli import main

        main(sys.argv[2:])
