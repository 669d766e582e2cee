"""The one tree of errors. Raised where the fact is known; turned into text and exit codes only in `cli/`.

The message says what is wrong and where (file, line, key, value); the hint is the next command.
"""

from __future__ import annotations


class DsparkError(Exception):
    """A failure that a user can act on.

    Args:
        message: what is wrong and where, one line.
        hint: the next command or the change that mends it.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class SettingsError(DsparkError):
    """Usage or settings: an unknown name, a value out of range, a file that does not parse."""

    exit_code = 2


class PreflightError(DsparkError):
    """The workspace, the machine or the target is not ready for what was asked."""

    exit_code = 3


class DataError(DsparkError):
    """Prompts, responses, features or records that cannot be used."""

    exit_code = 4


class CalibrationError(DataError):
    """Records or temperatures that calibration cannot use."""


class CostCurveError(DataError):
    """A cost curve that would switch the scheduler off silently or mislead it."""


class StageError(DsparkError):
    """A stage of the pipeline failed."""

    exit_code = 5


class GateError(DsparkError):
    """A gate refused, a parity or losslessness check failed, or a certificate is stale."""

    exit_code = 6


class IntegrityError(DsparkError):
    """A package or a stored file is not what its manifest says."""

    exit_code = 7


class ServiceError(DsparkError):
    """A service (registry, engine, hub) cannot be reached."""

    exit_code = 8


class Interrupted(BaseException):
    """A stop was requested and a safe point was reached (exit code 130).

    Not an `Exception`, so that no handler of ordinary failures swallows it.

    Args:
        message: what was stopped, if that is not plain.
        hint: what the same command would do.
    """

    exit_code = 130

    def __init__(self, message: str = "", hint: str = "the same command goes on from here") -> None:
        super().__init__(*([message] if message else []))
        self.hint = hint
