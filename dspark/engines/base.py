"""What an engine adapter is, and the pieces that launch scripts share."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dspark.errors import CalibrationError, DataError, SettingsError
from dspark.io.jsonfile import pretty_json

if TYPE_CHECKING:
    from dspark.drafters.config import DrafterConfig
    from dspark.scheduling.additive import AdditiveCost, ModelErrors
    from dspark.scheduling.config import SchedulerConfig, Temperatures
    from dspark.targets.record import TargetRecord


@dataclass(frozen=True)
class EngineInputs:
    """Everything an adapter may write into a package's `engines/<name>` folder.

    Attributes:
        drafter: the drafter's architecture.
        target: the target it belongs to.
        scheduler: temperatures and cost models.
        profile: the serving profile whose cost curve is written, a key of `scheduler.curves`; "": there is no curve.
        fingerprint: of the engine and machine that the curve was measured on.
        model_errors: how well the curve and the additive cost of the profile explain its steps; None: not known.
        temperature: of the traffic's sampling, which chooses the calibration; None: the one recommended for the target.
        no_curve: why there is no cost curve, where `profile` has none; None: nothing more is known than that.
        provenance: more that may travel inside the engine's files (digests, counts); JSON values.
    """

    drafter: DrafterConfig
    target: TargetRecord
    scheduler: SchedulerConfig
    profile: str
    fingerprint: Mapping[str, Any]
    temperature: float | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    model_errors: ModelErrors | None = None
    no_curve: str | None = None

    @property
    def why_no_curve(self) -> str | None:
        """Why nothing can be scheduled by a cost curve; None: there is one."""
        if self.profile in self.scheduler.curves:
            return None
        return self.no_curve or f"no cost curve for serving profile {self.profile!r}"

    @property
    def sampling_temperature(self) -> float:
        """Temperature of the traffic to serve."""
        return self.target.sampling.temperature if self.temperature is None else self.temperature

    @property
    def additive(self) -> AdditiveCost | None:
        """The additive cost of the profile, if one could be fitted."""
        return self.scheduler.additive.get(self.profile)

    @property
    def additive_is_closer(self) -> bool:
        """Whether the additive cost of the profile predicted its steps better than the curve did."""
        return self.additive is not None and self.model_errors is not None and self.model_errors.additive_is_closer


class Engine(Protocol):
    """One engine: what it can serve and the files that it loads."""

    name: str

    def supports(self, config: DrafterConfig) -> str | None:
        """Why the engine cannot serve such a drafter, or None if it can."""
        ...

    def files(self, inputs: EngineInputs) -> dict[str, bytes]:
        """The engine's own files by their path relative to `engines/<name>` of a package.

        Raises:
            SettingsError: if the engine cannot serve the drafter.
            DataError: if the cost curve or the temperatures would mislead the engine.
        """
        ...


class ServedTarget(Protocol):
    """What a launch script says of the target."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def public_id(self) -> str | None:
        """What others call it, if they know it."""

    @property
    def revision(self) -> str:
        """Of its repository, if it is one."""

    @property
    def source(self) -> Mapping[str, Any]:
        """Where it came from."""

    @property
    def quantisation(self) -> str | None:
        """Of its published weights, if they were converted."""


class Served(Protocol):
    """Whatever a launch script is written for."""

    @property
    def target(self) -> ServedTarget:
        """The target that it starts."""


_OVERRIDE = '"$DSPARK_TARGET"'
_UNNAMED = "this target has no public name: set DSPARK_TARGET to its folder"
_CONVERTED = (
    "the target was converted from quantised weights, and the public model has others: set DSPARK_TARGET to the "
    "folder of the converted ones, or to the public name if a drafter that was not measured on it will do"
)


def require_support(engine: Engine, config: DrafterConfig) -> None:
    """Refuse to write files for a drafter that the engine would misread.

    Raises:
        SettingsError: with the engine's reason.
    """
    if reason := engine.supports(config):
        raise SettingsError(f"{engine.name} cannot serve this drafter: {reason}", "leave this engine out of the build")


def calibration_for(calibrations: Sequence[Temperatures], temperature: float) -> Temperatures:
    """The calibration for traffic at a sampling temperature: greedy's for 0, else the nearest above 0.

    Engines have one table for all traffic, so the nearest has to do; the files say which it is.

    Raises:
        CalibrationError: if there is none of the kind.
    """
    fitting = [item for item in calibrations if (item.temperature > 0) == (temperature > 0)]
    if not fitting:
        have = ", ".join(f"{item.temperature:g}" for item in calibrations) or "none"
        raise CalibrationError(
            f"no calibration for traffic at temperature {temperature:g} (there are: {have})",
            "add the temperature to `calibration.temperatures` of the build",
        )
    # Of two of one temperature, what verification accepted is what an engine has to foresee.
    return min(
        fitting, key=lambda item: (abs(item.temperature - temperature), item.temperature, item.label == "greedy_match")
    )


def json_bytes(value: Any) -> bytes:
    """A JSON file as engines read it: UTF-8 without a byte order mark, no NaN or Infinity."""
    return pretty_json(value).encode("utf-8")


def launch_script(
    inputs: Served,
    *,
    about: Sequence[str],
    environment: str | None,
    target_flag: Sequence[str],
    only_file: str | None = None,
    command: Sequence[str],
    arguments: Sequence[Sequence[str]],
    raw_arguments: Sequence[str] = (),
    preparation: Sequence[str] = (),
) -> bytes:
    """A bash script that serves the target with its drafter from the folder that the script lies in.

    No word of it comes from outside unquoted, and no path in it is absolute. DSPARK_TARGET overrides the target (a
    folder or another id), and must be given where the public name stands for other weights than those of the package;
    further arguments are handed on to the engine.

    Args:
        about: comment lines.
        environment: name of a file of KEY=value lines that is loaded first.
        target_flag: words before the target's name, such as `--model-path`.
        only_file: why the target's public name will not do for this engine, and a file must be named; None: it will.
        command: the words of the engine's command.
        arguments: its arguments, one line each, quoted here.
        raw_arguments: arguments that are already bash, such as `"$(cat file)"`; never made from data.
        preparation: lines of bash that choose among the folder's files, run in that folder; never made from data.
    Raises:
        DataError: if the target's public name is a path of this machine.
    """
    public = inputs.target.public_id
    if public is not None and (public.startswith(("/", "~", "-", ".")) or "\\" in public or not public.isprintable()):
        raise DataError(
            f"target {inputs.target.name}: public_id {public!r} is not a name that others can use",
            "set public_id in the target's YAML to the name of its repository",
        )
    lines = ["#!/usr/bin/env bash", *_comments(about), "set -euo pipefail"]
    if only_file or public is None or inputs.target.quantisation is not None:
        lines.append(f': "${{DSPARK_TARGET:?{only_file or (_UNNAMED if public is None else _CONVERTED)}}}"')
        known = []
    else:
        known = [*target_flag, public, *_revision(inputs)]
    lines += [
        f"target=({_words(known)})",
        'if [ -n "${DSPARK_TARGET:-}" ]; then',
        '  if [ -e "$DSPARK_TARGET" ]; then DSPARK_TARGET=$(realpath -- "$DSPARK_TARGET"); fi',
        f"  target=({' '.join([*map(shlex.quote, target_flag), _OVERRIDE])})",
        "fi",
        'cd -- "$(dirname -- "${BASH_SOURCE[0]}")"',
    ]
    if environment is not None:
        lines += ["set -a", f". ./{shlex.quote(environment)}", "set +a"]
    lines += preparation
    body = [f'exec {_words(command)} "${{target[@]}}"', *map(_words, arguments), *raw_arguments, '"$@"']
    lines.append(" \\\n  ".join(body))
    return ("\n".join(lines) + "\n").encode("utf-8")


def environment_file(values: Mapping[str, str]) -> bytes:
    """KEY=value lines that both `set -a; . ./env` and `docker --env-file` read alike.

    Raises:
        DataError: if a value would need quoting, which the two disagree about.
    """
    for key, value in values.items():
        if shlex.quote(value) != value or not key.isidentifier():
            raise DataError(f"environment variable {key}={value!r} needs quoting, on which readers of env files differ")
    return "".join(f"{key}={value}\n" for key, value in values.items()).encode("utf-8")


def _revision(inputs: Served) -> list[str]:
    source = inputs.target.source
    # Only a hub commit means something to an engine; a wheel's or a folder's revision is ours.
    if source.get("kind") == "hub" and source.get("repo") == inputs.target.public_id:
        return ["--revision", inputs.target.revision]
    return []


def _comments(about: Sequence[str]) -> list[str]:
    """Comment lines; whatever a line quotes, nothing of it may end up outside the comment."""
    clean = ["".join(character if character.isprintable() else "?" for character in line) for line in about]
    return [f"# {part}" for line in clean for part in textwrap.wrap(line, 118, break_on_hyphens=False)]


def _words(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)
