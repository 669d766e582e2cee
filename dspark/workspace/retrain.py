"""`dspark retrain`: another round of a build for a new domain, from the drafter that is in production.

No declaration of the build is changed. What differs from `dspark run` is one layer over the build's file (domains,
initial weights, mixture, what to measure against), made anew each time from the champion and the command line; so the
same command goes on after a kill, and `dspark run` still makes what is declared. Only the domain itself is declared, in
new files, as `dspark targets add` declares a target: its prompts belong to the corpus and to version control.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspark.config.build import FOLDERS, ResolvedBuild
from dspark.config.declared import declared_names
from dspark.config.gates import PATH as GATES
from dspark.config.gates import read_gates
from dspark.config.layers import Origin, Overlay
from dspark.config.stages import BY_NAME
from dspark.corpus.catalogue import add_domain, read_domain_spec
from dspark.errors import PreflightError, SettingsError
from dspark.io.jsonfile import model_json
from dspark.io.progress import install_stop_signals
from dspark.package.manifest import Manifest
from dspark.registry.gate_report import GateReport
from dspark.registry.gates import judge
from dspark.targets.record import read_record
from dspark.workspace.champion import fetch_champion
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import ListenedProgress, Listener
from dspark.workspace.packages import require_fitting
from dspark.workspace.run import Report, Request, resolve_request, run

_MIXTURE = "training.mixture"


@dataclass(frozen=True)
class Retraining:
    """What to train on, and from where.

    Attributes:
        domain: that the drafter shall learn.
        prompts: a file to declare it from; None: it is declared.
        replay: share of the training that all other domains get, in [0, 1).
        source: the package to go on from, a folder or an address; None: what is in production.
        tracking_uri: of the registry that holds it.
    """

    domain: str
    prompts: Path | None
    replay: float
    source: str | None
    tracking_uri: str

    @property
    def words(self) -> tuple[str, ...]:
        """The verb and its options, as the user would type them."""
        prompts = ("--prompts", str(self.prompts)) if self.prompts is not None else ()
        source = ("--from", self.source) if self.source is not None else ()
        return ("retrain", "--domain", self.domain, *prompts, "--replay", f"{self.replay:g}", *source)


@dataclass(frozen=True)
class Retrained:
    """What came of it.

    Attributes:
        report: of the run.
        champion: package_digest of what it went on from and was measured against.
        gates: what `pipeline/gates.yaml` makes of the candidate beside the champion, every domain included; None: the
            workspace has no gates.
    """

    report: Report
    champion: str
    gates: GateReport | None

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        gates = {"gates": model_json(self.gates)} if self.gates is not None else {}
        return {**self.report.as_json(), "champion": self.champion, **gates}


def retrain(workspace: Workspace, request: Request, asked: Retraining, listener: Listener) -> Retrained:
    """Make a candidate that goes on from the champion, measured against it, and register it.

    Raises:
        SettingsError: a domain that cannot be declared or trained on, a mixture besides `asked`'s, or a champion of
            another target or geometry.
        PreflightError: no champion, or a domain that it was trained on is not declared here.
        DsparkError, Interrupted: as `run`.
    """
    _refuse_a_second_mixture(request)
    declared = resolve_request(workspace, request).chosen
    _require_trainable(workspace, declared, asked)
    install_stop_signals()
    started = time.monotonic()
    progress = ListenedProgress(listener, "champion")
    champion = fetch_champion(
        workspace, declared.name, asked.source, tracking_uri=asked.tracking_uri, progress=progress
    )
    progress.end(time.monotonic() - started)
    digest = champion.digests.package_digest
    record = workspace.target_record(declared.build.target.name)
    if record.is_file():  # before anything is declared; otherwise the run finds it out once the target is fetched
        require_fitting(workspace.package(digest), champion, declared.build, read_record(record))
    domains = _domains(workspace, declared, champion, asked.domain)
    if asked.prompts is not None:
        folder = workspace.root / FOLDERS["domain"]
        if add_domain(folder, asked.domain, asked.prompts, root=workspace.root):
            listener.note(f"declared {FOLDERS['domain']}/{asked.domain}.yaml; commit it with its prompts")
    listener.note(f"going on from package {digest[:12]} (build {champion.build}), which it is measured against")
    origin = Origin("verb", shlex.join(["dspark", *asked.words]))
    request = replace(request, overlay=Overlay(_layer(domains, asked, digest), origin), verb=asked.words)
    report = run(workspace, request, listener)
    return Retrained(report, digest, _judged(workspace, declared, digest))


def _judged(workspace: Workspace, declared: ResolvedBuild, champion: str) -> GateReport | None:
    """The gates, as a promotion from here would ask them; nothing hangs on them yet."""
    if not (workspace.root / GATES).is_file():
        return None
    return judge(
        workspace.root / BY_NAME["package"].output(declared.name, {}),
        read_gates(workspace.root),
        champion=champion,
        profiles=declared.profiles,
    )


def _layer(domains: Sequence[str], asked: Retraining, champion: str) -> dict[str, Any]:
    """What lies over the build's file."""
    # A build of an imported drafter trains from here on.
    training: dict[str, Any] = {"imported": None, "initial": {"package": champion}}
    if len(domains) > 1:
        training["mixture"] = {"new": [asked.domain], "replay": asked.replay}
    return {"domains": list(domains), "training": training, "against": champion}


def _refuse_a_second_mixture(request: Request) -> None:
    """Refuse settings of a mixture: it is made of `--domain` and `--replay`, and which of two counts would be a guess.

    Raises:
        SettingsError: a flag or a variable has some.
    """
    flags = [f"--set {flag}" for flag in request.flags if flag.strip().startswith(_MIXTURE)]
    variable = f"DSPARK_{_MIXTURE.upper().replace('.', '__')}"
    found = [*flags, *(name for name in request.environment if name.startswith(variable))]
    if found:
        raise SettingsError(
            f"{', '.join(found)}: a retraining's mixture is made of its domain and the share of the others",
            "give the share as --replay SHARE",
        )


def _require_trainable(workspace: Workspace, declared: ResolvedBuild, asked: Retraining) -> None:
    """Refuse what would only show after the champion was fetched.

    Raises:
        SettingsError: the domain is only evaluated, or neither declared nor given.
    """
    known = declared_names(workspace.root / FOLDERS["domain"])
    if asked.domain in declared.build.corpus.evaluation_domains:
        raise SettingsError(
            f"domain {asked.domain!r} is only ever evaluated in build {declared.name!r}, never trained on",
            "give the prompts that shall be trained on another name",
        )
    if asked.prompts is None and asked.domain not in known:
        raise SettingsError(
            f"domain {asked.domain!r} is not declared", "give its prompts, one JSON object a line: --prompts FILE"
        )
    if asked.domain in known:
        read_domain_spec(workspace.root / FOLDERS["domain"], asked.domain, root=workspace.root)


def _domains(workspace: Workspace, declared: ResolvedBuild, champion: Manifest, new: str) -> list[str]:
    """Everything to train and measure on: what the champion was trained on, what the build names, the new one last.

    Last, so that where it repeats a prompt the older domain keeps it: its answers and features are in the store.

    Raises:
        PreflightError: a domain of the champion is not declared here; whether it is forgotten could not be measured.
    """
    trained = champion.inputs.corpus.domains
    missing = sorted(set(trained) - {*declared_names(workspace.root / FOLDERS["domain"]), new})
    if missing:
        raise PreflightError(
            f"the champion was trained on {', '.join(missing)}, not declared in {FOLDERS['domain']}: "
            "that could neither be replayed nor measured",
            "bring the declaration and its prompts back from version control",
        )
    return list(dict.fromkeys([*declared.build.corpus.domains, *trained, new]))
