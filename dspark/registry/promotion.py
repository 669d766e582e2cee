"""Promote a registered package into a stage through its gates, and roll a stage back.

What is promoted is verified as the registry holds it, byte by byte, without running or unpickling anything of it; the
gates read that very copy. Who held the stage when the gates were asked is named in the promotion, so one that was
overtaken meanwhile counts for nothing (`dspark.registry.chain`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from dspark.errors import IntegrityError, SettingsError
from dspark.io.digest import digest_bytes
from dspark.io.jsonfile import canonical_json, model_json, strict_loads
from dspark.io.progress import Progress
from dspark.registry.chain import PREFIX, STAGES, Chain, Kind, Link, Removed
from dspark.registry.gate_report import GateReport, Stage
from dspark.registry.register import CANDIDATE, model_name
from dspark.registry.sources import fetched, source_version, version_of
from dspark.registry.stages import append, settled
from dspark.registry.tracking import Registry

Judge = Callable[[Path, str | None], GateReport]
GATES_TAG = f"{PREFIX}gates"  # the report itself, where it fits; its digest always
_MAX_REPORT = 60_000  # bytes that the smallest of MLflow's databases holds in a tag
_STEPS = 3


@dataclass(frozen=True)
class Author:
    """Who promotes, and from what.

    Attributes:
        by: a person or an automation.
        git_commit: of the workspace whose gates were asked, or why there is none.
    """

    by: str
    git_commit: str


@dataclass(frozen=True)
class Promotion:
    """What came of a promotion or a rollback that was not overtaken.

    Attributes:
        outcome: `refused` by the gates; `already`: it holds the stage; `would`: nothing was changed, as asked.
        source_version: of the build's model.
        replaces: the source version that holds, or held, the stage before; None: nobody.
        gates: what they said; None where none were asked.
        link: as it stands in history; None unless done.
        mended: aliases and marks that had to be set right, one line each.
    """

    outcome: Literal["done", "already", "would", "refused"]
    model: str
    stage: Stage
    source_version: int
    package_digest: str
    replaces: int | None
    gates: GateReport | None = None
    link: Link | None = None
    mended: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For `--json`; what is absent is left out."""
        found: dict[str, Any] = {
            "schema": "dspark/promotion/1",
            **{name: getattr(self, name) for name in ("outcome", "model", "stage", "source_version", "package_digest")},
            "replaces": self.replaces,
            "gates": self.gates and model_json(self.gates),
            "link": self.link and self.link.as_json(),
            "mended": list(self.mended),
        }
        return {key: value for key, value in found.items() if value is not None}


def promote(
    registry: Registry,
    build: str,
    stage: Stage,
    *,
    judge: Judge,
    author: Author,
    scratch: Path,
    version: int | None = None,
    alias: str = CANDIDATE,
    reason: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Promotion:
    """Promote a version of a build into a stage, if its gates are open.

    Args:
        judge: asks the gates about a package and the package digest of the champion, who holds production.
        author: recorded with the promotion.
        scratch: a folder in which the package is fetched, and removed again.
        version: of the build's model; None: the one that `alias` names.
        alias: `candidate`, or a stage, whose holder is then meant.
        reason: recorded with the promotion; demanded by `force`.
        force: promote what the gates refuse, and mark it so for ever. Verifies all the same.
        dry_run: ask the gates, change nothing.
        progress: reported to between steps, each a safe point.
    Raises:
        SettingsError: no such model, version or alias; force without a reason.
        IntegrityError: the registry does not hold the package that was registered; what is promoted must.
        GateError: somebody else replaced the same holder first.
        ServiceError: the registry could not do what was asked.
        Interrupted: at a safe point.
    """
    progress = progress or Progress()
    if force and not (reason or "").strip():
        raise SettingsError("a forced promotion needs a reason, which stays with it", "--force --reason TEXT")
    progress.start("promote", _STEPS)
    # The champion is whoever holds production, also for staging: the evidence was measured against it.
    named = (alias,) if version is None else ()
    needed = [one for one in STAGES if one in (stage, "production", *named)]
    found_chains = {one: settled(registry, build, one) for one in needed}
    chains = {one: chain for one, (chain, _) in found_chains.items()}
    source = source_version(registry, build, chains, version, alias)
    holder = chains[stage].head
    found = Promotion(
        "already",
        model_name(build),
        stage,
        int(source.version),
        source.tags["dspark.package_digest"],
        holder.source_version if holder else None,
        mended=tuple(line for _, lines in found_chains.values() for line in lines),
    )
    if holder is not None and holder.source_version == int(source.version):
        return replace(found, link=holder)
    progress.advance()
    champion = chains["production"].head
    with fetched(registry, source, scratch, progress) as package:
        progress.advance()
        report = judge(package, champion.package_digest if champion else None)
    if report.package_digest != found.package_digest:
        raise IntegrityError(f"the gates judged package {report.package_digest}, not {found.package_digest}")
    if dry_run or not (report.passed or force):
        return replace(found, outcome="would" if report.passed or force else "refused", gates=report)
    progress.advance()
    text = canonical_json(model_json(report))
    link = _link("promotion", found, chains[stage], author, reason)
    link = replace(link, gates=digest_bytes(text.encode("utf-8")), forced=not report.passed)
    extra = {GATES_TAG: text} if len(text.encode("utf-8")) <= _MAX_REPORT else {}
    chain = append(registry, build, stage, chains[stage], link, source, extra)
    return replace(found, outcome="done", gates=report, link=chain.holds(link.identity))


def gates_of(registry: Registry, chain: Chain, link: Link) -> GateReport | None:
    """What the gates said of a promotion; None if they were not asked, or said more than the registry can hold.

    Raises:
        IntegrityError: it is not what was recorded with the promotion.
    """
    found = version_of(registry, chain.model, link.version)
    text = found.tags.get(GATES_TAG) if found is not None else None
    if text is None or link.gates is None:
        return None
    where = f"{chain.model} version {link.version}"
    if digest_bytes(text.encode("utf-8")) != link.gates:
        raise IntegrityError(f"{where}: its gate report was changed", "restore it from a backup of the registry")
    try:
        return GateReport.model_validate(strict_loads(text))
    except ValueError as reason:
        raise IntegrityError(f"{where}: its gate report cannot be read: {reason}", "use a newer dspark") from None


def rollback(
    registry: Registry,
    build: str,
    stage: Stage,
    *,
    author: Author,
    scratch: Path,
    reason: str,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Promotion:
    """Promote again what held a stage before its holder, as a new link; history keeps both.

    No gates are asked, since this is how a bad promotion ends, but the package is verified. A second rollback goes
    back further, not forth again.

    Args: as `promote`.

    Raises:
        SettingsError: nobody holds the stage, or nobody held it before; no reason was given.
        IntegrityError, GateError, ServiceError, Interrupted: as `promote`.
    """
    progress = progress or Progress()
    if not reason.strip():
        raise SettingsError("a rollback needs a reason, which stays with it", "--reason TEXT")
    progress.start("rollback", _STEPS)
    chain, mended = settled(registry, build, stage)
    target = _earlier(chain, build, stage)
    holder = chain.head
    # The stage's own copy, which is there even if the version of the build's model was deleted since.
    source = version_of(registry, chain.model, target.version)
    progress.advance()
    with fetched(registry, source, scratch, progress):
        progress.advance()
    found = Promotion(
        "would",
        model_name(build),
        stage,
        target.source_version,
        target.package_digest,
        holder.source_version if holder else None,
        mended=mended,
    )
    if dry_run:
        return found
    progress.advance()
    link = replace(_link("rollback", found, chain, author, reason), restores=target.version)
    after = append(registry, build, stage, chain, link, source, {})
    return replace(found, outcome="done", link=after.holds(link.identity))


def _earlier(chain: Chain, build: str, stage: Stage) -> Link:
    """What to go back to.

    Raises:
        SettingsError: there is nothing.
    """
    history = f"dspark registry history {build} --stage {stage}"
    if chain.head is None:
        raise SettingsError(f"nothing of build {build!r} holds {stage}", history)
    before = chain.before(chain.head)
    if before is None:
        raise SettingsError(
            f"version {chain.head.source_version} of build {build!r} is the first that held {stage}",
            history,
        )
    if isinstance(before, Removed):
        raise SettingsError(
            f"what held {stage} before, {chain.model} version {before.version}, was deleted from the registry",
            f"dspark promote {build} --version N --to {stage}; {history}",
        )
    return before


def _link(kind: Kind, found: Promotion, chain: Chain, author: Author, reason: str | None) -> Link:
    return Link(
        version=0,
        identity=uuid.uuid4().hex,
        source_version=found.source_version,
        package_digest=found.package_digest,
        replaces=chain.tip,
        kind=kind,
        by=author.by,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        git_commit=author.git_commit,
        reason=(reason or "").strip() or None,
    )
