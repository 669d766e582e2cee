"""Stage `calibrate`: the confidences of a drafter against what verification decides, in the real loop."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.calibration import Records, STSResult, fit_temperatures
from dspark.config.models import CalibrationSettings, EvaluationSettings
from dspark.corpus.prompts import PreparedPrompt
from dspark.decoding.drafting import Proposer
from dspark.decoding.records import calibration_records, label_of
from dspark.evaluation.decoding import decode_prompts, first_prompts
from dspark.io.progress import Progress
from dspark.scheduling.config import CalibrationKey
from dspark.targets.loading import Target


def calibrate_drafter(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[PreparedPrompt],
    settings: CalibrationSettings,
    progress: Progress | None = None,
    recorded: Records | None = None,
) -> list[STSResult]:
    """Decode the calibration prompts with whole blocks verified, and fit temperatures to what was recorded.

    Args:
        target: in the dtype to calibrate in.
        proposer: drafts.
        prompts: of the calibration split; half of the conversations is fitted on, the other half decides.
        settings: which temperatures of the target, how many prompts, how they are decoded and fitted.
        progress: one task per temperature.
        recorded: what an engine recorded; its sampling is not decoded for again. None: everything is decoded here.
    Returns:
        one result per sampling and label: greedy matches and sampled acceptances are never mixed.
    Raises:
        DataError: nothing was drafted.
        Interrupted: at a safe point.
    """
    progress = progress or Progress()
    chosen = first_prompts(prompts, settings.prompts_per_domain)
    decoding = EvaluationSettings(
        max_new_tokens=settings.max_new_tokens, batch_size=settings.batch_size, seed=settings.seed
    )
    results = [] if recorded is None else [fit_temperatures(recorded, settings, progress=progress)]
    known = [result.calibration.key for result in results]
    for temperature in settings.temperatures:
        if CalibrationKey(temperature=temperature, label=label_of(temperature)) in known:
            continue
        progress.start(f"decode at temperature {temperature:g}", len(chosen), unit="prompts")
        decoded = decode_prompts(target, proposer, chosen, decoding, temperature=temperature, progress=progress)
        records = Records(**vars(calibration_records(decoded.decoded)))
        results.append(fit_temperatures(records, settings, progress=progress))
    return results
