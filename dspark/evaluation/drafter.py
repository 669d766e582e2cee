"""Stage `evaluate`: everything that is measured of a trained drafter, into one folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dspark.calibration import CalibrationReport
from dspark.config.models import DType, EvaluationSettings
from dspark.corpus.prompts import PreparedPrompt
from dspark.decoding.drafting import Proposer
from dspark.decoding.policies import Fixed, NoDrafts, Scheduled
from dspark.decoding.proposers import torch_proposer
from dspark.decoding.records import RecordSet, label_of, write_records
from dspark.drafters.base import Drafter
from dspark.errors import SettingsError
from dspark.evaluation.acceptance import (
    SweepRow,
    measure_temperature,
    threshold_sweep,
    write_position_csv,
    write_sweep_csv,
)
from dspark.evaluation.decoding import decode_prompts, first_prompts, spread_prompts
from dspark.evaluation.lossless import CASES, check_greedy, check_sampled
from dspark.evaluation.results import EvaluationMetrics, LosslessReport, TemperatureMetrics, ThroughputReport
from dspark.evaluation.rivals import RivalDrafter, Rivalry
from dspark.evaluation.throughput import NONE, Arm, compare, pareto
from dspark.io.jsonfile import write_model
from dspark.io.progress import Progress
from dspark.processor import arithmetic
from dspark.scheduling.cost import StepCost
from dspark.scheduling.prefix import PrefixScheduler
from dspark.targets.loading import Target

SCHEDULED_ARM = "torch scheduled"

Load = Callable[[DType], tuple[Target, Drafter]]
Backends = Callable[[Target], Mapping[str, Proposer]]


def evaluate_drafter(
    load: Load,
    prompts: Sequence[PreparedPrompt],
    settings: EvaluationSettings,
    out: Path,
    *,
    training_domains: Sequence[str],
    calibration: CalibrationReport | None = None,
    cost: StepCost | None = None,
    no_cost: str | None = None,
    backends: Backends | None = None,
    rivals: Sequence[RivalDrafter] = (),
    sampled: Load | None = None,
    progress: Progress | None = None,
) -> EvaluationMetrics:
    """Acceptance, losslessness and throughput of a drafter.

    Writes `metrics.json`, `per_position.csv`, `threshold_sweep.csv`, `pareto.json`, `lossless.json` and
    `records/temperature-<t>.safetensors` into `out`, and with rivals `paired.json` and `against/<digest>/` with their
    records. Temperature 0 is always among the temperatures: losslessness is checked on it.

    Args:
        load: the target and the trained drafter in a dtype, on the device that is measured.
        prompts: of the eval split.
        settings: `dtype` must be float32.
        out: an existing or new folder.
        training_domains: whose mean is reported; the other domains stand beside it.
        calibration: temperatures of the confidence head; None: only raw confidences.
        cost: of the machine's steps, for an arm with policy `scheduled`; None, or a drafter without a confidence head:
            no such arm.
        no_cost: why there are none, for `absent` of the metrics.
        backends: further proposers on the same drafter for the throughput comparison, by name.
        rivals: drafters of other packages of this target, which decode the same prompts at every temperature.
        sampled: the same on a faster device, for temperatures above 0, where only acceptance is measured; None: `load`.
            What losslessness is checked on and what is timed stays where it is measured.
        progress: shows the decoding, the checks and the rounds.
    Raises:
        SettingsError: half precision, in which losslessness cannot be told from ties.
    """
    if settings.dtype != "float32":
        raise SettingsError(
            f"evaluation.dtype is {settings.dtype}: losslessness needs float32", "set throughput_dtype instead"
        )
    progress = progress or Progress()
    loaded = _Loaded()
    faster = sampled or load
    chosen = first_prompts(prompts, settings.prompts_per_domain)
    metrics: dict[str, TemperatureMetrics] = {}
    rows: list[SweepRow] = []
    rivalry = Rivalry(rivals, out)
    for temperature in sorted({0.0, *settings.temperatures}):
        wanted = (settings.dtype, load) if temperature == 0 else (settings.sampled_dtype, faster)
        target, drafter = loaded.in_dtype(*wanted)
        name, dtype = f"{temperature:g}", target.dtype_name
        progress.start(f"decode at temperature {name}", len(chosen), unit="prompts")
        proposer = torch_proposer(drafter)
        records = decode_prompts(target, proposer, chosen, settings, temperature=temperature, progress=progress)
        write_records(out / "records" / f"temperature-{name}.safetensors", records)
        scales = temperatures_of(calibration, temperature)
        metrics[name] = measure_temperature(records, training_domains, dtype, temperatures=scales, seed=settings.seed)
        rows += threshold_sweep(records, scales)
        rivalry.measure(target, records, chosen, settings, progress)
        if temperature == 0:
            write_model(out / "lossless.json", _check_lossless(target, chosen, records, progress))
        del target, drafter, proposer  # two dtypes of a large target need not fit together
    write_position_csv(out / "per_position.csv", metrics)
    write_sweep_csv(out / "threshold_sweep.csv", rows)
    paired = rivalry.report(records.decoded[0].cycles.gamma)
    if paired is not None:
        write_model(out / "paired.json", paired)
    target, drafter = loaded.in_dtype(settings.throughput_dtype, load)
    asked = [prompt for prompt in prompts if prompt.domain in training_domains] or list(prompts)
    throughput = measure_throughput(target, drafter, asked, settings, calibration, cost, backends, progress)
    write_model(out / "pareto.json", pareto([throughput]))
    report = EvaluationMetrics(
        gamma=drafter.config.gamma,
        policy=Fixed().name,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
        temperatures=metrics,
        throughput=throughput,
        absent=_absent(drafter, cost, no_cost),
    )
    write_model(out / "metrics.json", report)
    return report


def _absent(drafter: Drafter, cost: StepCost | None, no_cost: str | None) -> dict[str, str]:
    """What the throughput comparison lacks, and why."""
    if not drafter.config.confidence:
        return {SCHEDULED_ARM: "the drafter has no confidence head"}
    return {} if cost is not None else {SCHEDULED_ARM: no_cost or "no step times were measured"}


class _Loaded:
    """The target and the drafter in the dtype, and on the device, asked for last."""

    def __init__(self) -> None:
        self._load: Load | None = None
        self._pair: tuple[Target, Drafter] | None = None

    def in_dtype(self, dtype: DType, load: Load) -> tuple[Target, Drafter]:
        """Load it unless it is there; what was there before is let go first."""
        pair, self._pair = self._pair, None
        if load is not self._load or pair is None or pair[0].dtype_name != arithmetic(dtype, pair[0].device.type):
            pair = None
            pair = load(dtype)
        self._load, self._pair = load, pair
        return pair


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


def measure_throughput(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[PreparedPrompt],
    settings: EvaluationSettings,
    calibration: CalibrationReport | None,
    cost: StepCost | None,
    backends: Backends | None,
    progress: Progress,
) -> ThroughputReport:
    """Plain decoding, whole blocks of every backend, and scheduled ones where there are costs and confidences, in turn.

    Args:
        prompts: `throughput_prompts` of them are asked, domains in turn.
        calibration, cost, backends, progress: see `evaluate_drafter`; the caller need not start the task.
    """
    proposers: dict[str, Proposer] = {"torch": torch_proposer(drafter)}
    proposers |= backends(target) if backends is not None else {}
    arms = [Arm(NONE, None, NoDrafts())]
    arms += [Arm(f"{name} fixed", proposer, Fixed()) for name, proposer in proposers.items()]
    if cost is not None and drafter.config.confidence:
        scheduler = PrefixScheduler(cost, drafter.config.gamma, temperatures_of(calibration, 0.0))
        arms.append(Arm(SCHEDULED_ARM, proposers["torch"], Scheduled(scheduler)))
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
