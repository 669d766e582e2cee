"""Other packages' drafters on the candidate's own prompts, in the candidate's own run.

A rival's drafter is the one that its package holds, in the dtype that the engines load; the candidate's is the one that
was trained. That difference is the export's, which is certified apart and is far below what a gate asks about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.config.models import EvaluationSettings
from dspark.corpus.prompts import PreparedPrompt
from dspark.decoding.drafting import Proposer
from dspark.decoding.proposers import torch_proposer
from dspark.decoding.records import RecordSet, write_records
from dspark.drafters.base import Drafter
from dspark.errors import DataError
from dspark.evaluation.decoding import decode_prompts
from dspark.evaluation.paired import PairedPrompts, PairedReport, Rival
from dspark.io.progress import Progress
from dspark.targets.loading import Target

if TYPE_CHECKING:
    from dspark.scheduling.prefix import PrefixScheduler

FOLDER = "against"  # of the rivals' own records, below the evaluation's folder


@dataclass(frozen=True)
class RivalDrafter:
    """The drafter of a package that was verified.

    Attributes:
        package_digest, model_digest, build, gamma, training_domains: as its manifest says.
        load: the drafter on a target's embedding and head, in the target's dtype.
    """

    package_digest: str
    model_digest: str
    build: str
    gamma: int
    training_domains: tuple[str, ...]
    load: Callable[[Target], Drafter]


@dataclass(frozen=True)
class Champion:
    """What takes turns with the candidate where throughput is certified.

    Attributes:
        package_digest: as its manifest says.
        load: what drafts, on the target.
        scheduler: of its own calibration and cost curve; None: its package has no curve for the profile.
    """

    package_digest: str
    load: Callable[[Target], Proposer]
    scheduler: PrefixScheduler | None


class Rivalry:
    """Collects what rivals do at each temperature, beside the candidate."""

    def __init__(self, rivals: Sequence[RivalDrafter], out: Path) -> None:
        self._rivals = rivals
        self._out = out
        self._found: dict[str, dict[str, PairedPrompts]] = {rival.package_digest: {} for rival in rivals}

    def measure(
        self,
        target: Target,
        candidate: RecordSet,
        prompts: Sequence[PreparedPrompt],
        settings: EvaluationSettings,
        progress: Progress,
    ) -> None:
        """Decode what the candidate has just decoded, and keep both sides.

        Args:
            candidate: its records on these very prompts; a prompt's draws depend on its id, so both sides share them.
        Raises:
            DataError: the package's drafter has another block size than its manifest says.
        """
        name = f"{candidate.temperature:g}"
        for rival in self._rivals:
            progress.start(
                f"decode with {rival.package_digest[:12]} at temperature {name}", len(prompts), unit="prompts"
            )
            drafter = rival.load(target)
            if drafter.config.gamma != rival.gamma:
                raise DataError(
                    f"package {rival.package_digest} has blocks of {drafter.config.gamma}, not {rival.gamma}"
                )
            proposer = torch_proposer(drafter)
            records = decode_prompts(
                target, proposer, prompts, settings, temperature=candidate.temperature, progress=progress
            )
            write_records(self._out / FOLDER / rival.package_digest / f"temperature-{name}.safetensors", records)
            self._found[rival.package_digest][name] = PairedPrompts.of(candidate, records)

    def report(self, gamma: int) -> PairedReport | None:
        """Everything, or None without rivals.

        Args:
            gamma: of the candidate.
        """
        if not self._rivals:
            return None
        return PairedReport(
            gamma=gamma,
            rivals=tuple(
                Rival(
                    package_digest=rival.package_digest,
                    model_digest=rival.model_digest,
                    build=rival.build,
                    gamma=rival.gamma,
                    training_domains=rival.training_domains,
                    temperatures=self._found[rival.package_digest],
                )
                for rival in self._rivals
            ),
        )
