"""Stage `evaluate`: everything that is measured of a trained drafter, into one folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dspark.calibration import CalibrationReport
from dspark.config.models import DType, EvaluationSettings
from dspark.corpus.prompts import PreparedPrompt
from dspark.decoding.drafting import Proposer, TorchProposer
from dspark.decoding.policies import Fixed, NoDrafts, Scheduled
from dspark.decoding.records import RecordSet, label_of, write_records
from dspark.drafters.dspark import DSparkDrafter
from dspark.errors import SettingsError
from dspark.evaluation.acceptance import measure_temperature, threshold_sweep, write_position_csv, write_sweep_csv
from dspark.evaluation.decoding import decode_prompts, first_prompts, spread_prompts
from dspark.evaluation.lossless import CASES, check_greedy, check_sampled
from dspark.evaluation.results import EvaluationMetrics, LosslessReport, TemperatureMetrics, ThroughputReport
from dspark.evaluation.throughput import NONE, Arm, compare, pareto
from dspark.io.jsonfile import write_model
from dspark.io.progress import Progress
from dspark.scheduling.cost import CostCurve
from dspark.scheduling.prefix import PrefixScheduler
from dspark.targets.loading import Target

Load = Callable[[DType], tuple[Target, DSparkDrafter]]
Backends = Callable[[Target], Mapping[str, Proposer]]


def evaluate_drafter(
    load: Load,
    prompts: Sequence[PreparedPrompt],
    settings: EvaluationSettings,
    out: Path,
    *,
    training_domains: Sequence[str],
    calibration: CalibrationReport | None = None,
    curve: CostCurve | None = None,
    backends: Backends | None = None,
    progress: Progress | None = None,
) -> EvaluationMetrics:
    """Acceptance, losslessness and throughput of a drafter.

    Writes `metrics.json`, `per_position.csv`, `threshold_sweep.csv`, `pareto.json`, `lossless.json` and
    `records/temperature-<t>.safetensors` into `out`. Temperature 0 is always among the temperatures: losslessness is
    checked on it.

    Args:
        load: the target and the trained drafter in a dtype; called once per dtype, so that one pair is held at a time.
        prompts: of the eval split.
        settings: `dtype` must be float32.
        out: an existing or new folder.
        training_domains: whose mean is reported; the other domains stand beside it.
        calibration: temperatures of the confidence head; None: only raw confidences.
        curve: the cost curve of the machine, for an arm with policy `scheduled`; None: no such arm.
        backends: further proposers on the same drafter for the throughput comparison, by name.
        progress: shows the decoding, the checks and the rounds.
    Raises:
        SettingsError: half precision, in which losslessness cannot be told from ties.
    """
    if settings.dtype != "float32":
        raise SettingsError(
            f"evaluation.dtype is {settings.dtype}: losslessness needs float32", "set throughput_dtype instead"
        )
    progress = progress or Progress()
    chosen = first_prompts(prompts, settings.prompts_per_domain)
    target, drafter = load(settings.dtype)
    gamma = drafter.config.gamma
    records: dict[str, RecordSet] = {}
    for temperature in sorted({0.0, *settings.temperatures}):
        progress.start(f"decode at temperature {temperature:g}", len(chosen), unit="prompts")
        decoded = decode_prompts(
            target, TorchProposer(drafter), chosen, settings, temperature=temperature, progress=progress
        )
        records[f"{temperature:g}"] = decoded
        write_records(out / "records" / f"temperature-{temperature:g}.safetensors", decoded)
    metrics, rows = {}, []
    for name, decoded in records.items():
        scales = temperatures_of(calibration, decoded.temperature)
        metrics[name] = measure_temperature(decoded, training_domains, temperatures=scales, seed=settings.seed)
        rows += threshold_sweep(decoded, scales)
    write_position_csv(out / "per_position.csv", metrics)
    write_sweep_csv(out / "threshold_sweep.csv", rows)
    write_model(out / "lossless.json", _check_lossless(target, chosen, records["0"], progress))
    if settings.throughput_dtype != settings.dtype:
        del target, drafter
        target, drafter = load(settings.throughput_dtype)
    asked = [prompt for prompt in prompts if prompt.domain in training_domains] or list(prompts)
    throughput = _measure_throughput(target, drafter, asked, settings, calibration, curve, backends, progress)
    write_model(out / "pareto.json", pareto([throughput]))
    report = _report(settings, gamma, metrics, throughput)
    write_model(out / "metrics.json", report)
    return report


def temperatures_of(calibration: CalibrationReport | None, temperature: float) -> tuple[float, ...] | None:
    """The confidence temperatures fitted at a temperature of the target without top-k or top-p, [gamma]; or None."""
    for result in calibration.results if calibration is not None else ():
        key = result.key
        if (key.temperature, key.label, key.top_k, key.top_p) == (temperature, label_of(temperature), 0, 1.0):
            return result.temperatures
    return None


def _check_lossless(
    target: Target, prompts: Sequence[PreparedPrompt], records: RecordSet, progress: Progress
) -> LosslessReport:
    progress.start("score greedy texts", len(prompts), unit="prompts")
    token_ids = [prompt.token_ids for prompt in prompts]
    greedy = check_greedy(target, token_ids, records.ids, records.decoded, progress)
    progress.start("enumerate sampled texts", len(CASES), unit="cases")
    return LosslessReport.of(greedy, check_sampled(progress))


def _measure_throughput(
    target: Target,
    drafter: DSparkDrafter,
    prompts: Sequence[PreparedPrompt],
    settings: EvaluationSettings,
    calibration: CalibrationReport | None,
    curve: CostCurve | None,
    backends: Backends | None,
    progress: Progress,
) -> ThroughputReport:
    proposers: dict[str, Proposer] = {"torch": TorchProposer(drafter)}
    proposers |= backends(target) if backends is not None else {}
    arms = [Arm(NONE, None, NoDrafts())]
    arms += [Arm(f"{name} fixed", proposer, Fixed()) for name, proposer in proposers.items()]
    if curve is not None:
        scheduler = PrefixScheduler(curve, drafter.config.gamma, temperatures_of(calibration, 0.0))
        arms.append(Arm("torch scheduled", proposers["torch"], Scheduled(scheduler)))
    progress.start("measure throughput", len(arms) * settings.throughput_rounds, unit="rounds")
    return compare(
        target,
        arms,
        [prompt.token_ids for prompt in spread_prompts(prompts, settings.throughput_prompts)],
        rounds=settings.throughput_rounds,
        max_new_tokens=settings.throughput_new_tokens,
        seed=settings.seed,
        progress=progress,
    ).report()


def _report(
    settings: EvaluationSettings, gamma: int, metrics: dict[str, TemperatureMetrics], throughput: ThroughputReport
) -> EvaluationMetrics:
    return EvaluationMetrics(
        dtype=settings.dtype,
        gamma=gamma,
        policy=Fixed().name,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
        temperatures=metrics,
        throughput=throughput,
    )
