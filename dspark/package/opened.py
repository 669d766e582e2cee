"""A package in a program's hands: verified once, then its scheduler, its certificate and what drafts with its drafter.

The light base install is enough for everything but `Package.proposer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.errors import IntegrityError, PreflightError, SettingsError
from dspark.evaluation.entry import CertificateEntry, Recommendation
from dspark.package.certificate import Certificate
from dspark.package.evidence import certificate_of
from dspark.package.layout import SCHEDULER
from dspark.package.manifest import Manifest
from dspark.package.verify import VerifyReport, read_manifest, verify
from dspark.scheduling.config import SchedulerConfig, read_scheduler
from dspark.scheduling.prefix import PrefixScheduler

if TYPE_CHECKING:
    from dspark.decoding.drafting import Proposer
    from dspark.targets.loading import Target

_SAME = ("weights_digest", "embedding_digest", "head_digest")


@dataclass(frozen=True)
class Package:
    """A verified package.

    Attributes:
        folder: where it lies.
        manifest: what it is: target, corpus, drafter, files, digests.
        certificate: what was measured, by serving profile.
        scheduling: gamma, temperatures, cost curves and policy (`scheduler/scheduler.json`).
        report: what was verified, and how far that reaches.
    """

    folder: Path
    manifest: Manifest
    certificate: Certificate
    scheduling: SchedulerConfig
    report: VerifyReport

    @property
    def gamma(self) -> int:
        """Draft tokens of a block."""
        return self.manifest.drafter.gamma

    def entry(self, profile: str | None = None) -> CertificateEntry:
        """What was measured on a serving profile.

        Args:
            profile: its name; None: the only one that the certificate has.
        Raises:
            SettingsError: there is no such entry, or several to choose from; lists them.
        """
        entries = {entry.profile: entry for entry in self.certificate.entries}
        return entries[_chosen(profile, list(entries), f"{self.folder}: the certificate")]

    def recommended(self, concurrency: int, profile: str | None = None) -> Recommendation | None:
        """What the certificate advises to run at so many concurrent requests; None: nothing was measured there.

        Args:
            concurrency: requests that are decoded together.
            profile: as in `entry`.
        Raises:
            SettingsError: as `entry`.
        """
        for one in self.entry(profile).recommended:
            if one.from_concurrency <= concurrency <= one.to_concurrency:
                return one
        return None

    def scheduler(self, profile: str | None = None, *, temperature: float = 0.0) -> PrefixScheduler:
        """The scheduler of a serving profile, with the temperatures that were calibrated for a sampling.

        Args:
            profile: whose cost curve; None: the only one that there is.
            temperature: of the target; that of the traffic.
        Raises:
            SettingsError: no cost curve of that profile, several to choose from, or no calibration at that
                temperature (a drafter without a confidence head has none); lists those that there are.
        """
        chosen = _chosen(profile, list(self.scheduling.curves), f"{self.folder}: the table of cost curves")
        return self.scheduling.scheduler(chosen, temperature)

    def proposer(self, target: Target) -> Proposer:
        """What drafts with the package's drafter, in torch, where the target is and in its dtype.

        Raises:
            SettingsError: the drafter was trained on another target; names what differs.
            PreflightError: torch is not installed.
            IntegrityError: the weights are not those of the manifest.
        """
        try:
            from dspark.decoding.proposers import torch_proposer
            from dspark.drafters.checkpoint import read_checkpoint
        except ModuleNotFoundError as missing:
            raise PreflightError(f"drafting needs {missing.name}", "pip install 'dspark[pipeline]'") from None
        wanted = self.manifest.inputs.target
        if other := [name for name in _SAME if getattr(target.record, name) != getattr(wanted, name)]:
            raise SettingsError(
                f"{self.folder} drafts for {wanted.name} ({wanted.public_id}); {target.record.name} differs in "
                + ", ".join(other),
                "load the target that it was trained on, or train a drafter for this one: dspark run --target NAME",
            )
        drafter = read_checkpoint(self.folder / "drafter", target.embedding, target.head, record=target.record)
        return torch_proposer(drafter.to(target.dtype))


def load_package(folder: str | Path, *, digest: str | None = None, key: str | Path | None = None) -> Package:
    """Verify a package completely and open it. Nothing of it is run or unpickled.

    Args:
        folder: `builds/NAME/package`, or a copy of it wherever it was pulled to.
        digest: its package_digest or self_digest, obtained elsewhere: without it (or a key) a package is shown to be
            whole, not to be the one that was meant.
        key: a public key (`dspark package keygen`) that it must be signed with.
    Raises:
        IntegrityError: anything in it is not what the manifest says, or it is not the package that was asked for.
        SettingsError: `digest` is no digest, `key` no key.
    """
    place = Path(folder)
    report = verify(place, digest=digest, key=None if key is None else Path(key))
    manifest = read_manifest(place)
    if manifest.digests.self_digest != report.self_digest:
        raise IntegrityError(f"{place} changed while it was read", "read a copy that nobody writes to")
    return Package(place, manifest, certificate_of(place, manifest), read_scheduler(place / SCHEDULER), report)


def _chosen(name: str | None, known: list[str], what: str) -> str:
    if name in known:
        return str(name)
    there = ", ".join(sorted(known)) or "none"
    if name is None and len(known) == 1:
        return known[0]
    if name is None:
        raise SettingsError(f"{what} has {len(known)} serving profiles: name one", f"there are: {there}")
    raise SettingsError(f"{what} has no serving profile {name!r}", f"there are: {there}")
