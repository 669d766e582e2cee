"""A finished drafter on a suite of benchmark sets: acceptance per set, per group of sets and over all of them.

Chain drafting with whole blocks verified, as the paper measures (DSpark, section 4.1). Every set's records are written
as they are finished, so that what was stopped goes on from there; the report is worked out from the records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from dspark.calibration import Assessment, CalibrationReport, Records, assess
from dspark.config.models import Digest, DType, EvaluationSettings, Name
from dspark.config.suites import BenchmarkSet, SuiteSpec
from dspark.corpus.benchmarks import SetReading
from dspark.corpus.prompts import PreparedPrompt, Rejection, merge_duplicates
from dspark.corpus.screening import PromptEncoder, screen
from dspark.corpus.splits import order_key
from dspark.corpus.summary import count_reasons
from dspark.decoding.proposers import torch_proposer
from dspark.decoding.records import Label, RecordSet, calibration_records, label_of, read_records, write_records
from dspark.drafters.base import Drafter
from dspark.errors import DataError, SettingsError
from dspark.evaluation.acceptance import (
    NO_CONFIDENCE,
    SweepRow,
    mean_of_domains,
    measure_temperature,
    threshold_sweep,
    write_position_csv,
    write_sweep_csv,
)
from dspark.evaluation.decoding import decode_prompts
from dspark.evaluation.drafter import measure_throughput, temperatures_of
from dspark.evaluation.results import DomainMetrics, MeanOfDomains, Model, TemperatureMetrics, ThroughputReport
from dspark.evaluation.throughput import pareto
from dspark.io.digest import digest_json
from dspark.io.jsonfile import model_json, read_model, write_model
from dspark.io.progress import Progress
from dspark.processor import arithmetic
from dspark.scheduling.cost import StepCost
from dspark.targets.loading import Target

REPORT, INPUTS = "suite.json", "inputs.json"
Load = Callable[[DType], tuple[Target, Drafter]]


class SetOrigin(Model):
    """What became of the rows of a set: rows = rejected + asked + beyond."""

    title: str
    group: Name
    licence: str
    origin: str
    files: dict[str, Digest]  # sha256 by name
    released: int  # rows that the authors released, as the suite says
    rows: int  # that were found
    outside: int  # rows of the same files that are no part of the set
    rejected: dict[str, int]  # by reason; `duplicate` among them, and `too-long` with a reply for the target
    asked: int
    beyond: int  # rows that were not needed any more, and not looked at
    turns_left_out: int  # later turns of all rows' conversations: the first is asked


class SuiteTemperature(Model):
    """All sets at one temperature of the target; drafts are sampled at the same one."""

    label: Label
    dtype: DType  # of the target and the drafter
    sets: dict[str, DomainMetrics]
    groups: dict[str, MeanOfDomains]  # unweighted means over the sets of a group
    mean: MeanOfDomains | None = None  # over all sets
    confidence: Assessment | None = None  # of the confidence head on all sets, before and after STS
    absent: dict[str, str] = Field(default_factory=dict)


class SuiteInputs(Model):
    """What the records of a folder were decoded from: records of other inputs are never mixed in."""

    schema_: Literal["dspark/suite-inputs/1"] = Field(default="dspark/suite-inputs/1", alias="schema")
    suite: Name
    build: Name
    target: Name
    target_digest: Digest
    drafter_weights_sha256: Digest
    prompts: dict[str, Digest]  # by set: ids and token ids of what is asked, in order
    settings: EvaluationSettings


class SuiteReport(Model):
    """`suite.json`."""

    schema_: Literal["dspark/suite/1"] = Field(default="dspark/suite/1", alias="schema")
    inputs: SuiteInputs
    gamma: int
    policy: str  # under which acceptance was measured: whole blocks
    verification_rule: Literal["standard"] = "standard"
    includes_bonus: Literal[True] = True
    origins: dict[str, SetOrigin]
    temperatures: dict[str, SuiteTemperature]
    throughput: ThroughputReport | None = None  # at temperature 0; absent unless it was asked for


@dataclass(frozen=True)
class PreparedSet:
    """A set as it is asked."""

    spec: BenchmarkSet
    origin: SetOrigin
    prompts: tuple[PreparedPrompt, ...]

    @property
    def digest(self) -> str:
        """Of what is asked."""
        return digest_json([[prompt.id, prompt.token_ids] for prompt in self.prompts])


def prepare_set(
    spec: BenchmarkSet,
    reading: SetReading,
    files: Mapping[str, str],
    encoder: PromptEncoder,
    suite: SuiteSpec,
    *,
    limit: int | None,
    max_position: int,
    seed: int = 0,
) -> PreparedSet:
    """Screen the rows of a set and choose what is asked.

    Sets stand for themselves: a prompt that two sets have is asked in both. In hash order the first n of a set are a
    fair sample, and the same ones whatever the limit of others is.

    Args:
        files: sha256 of each file, by name.
        limit: of the prompts, below the set's own; None: the set's own.
        max_position: of the target.
        seed: of the order.
    Raises:
        DataError: no row can be asked; the first reasons are named. Or replies are as long as the target allows.
    """
    room = max_position - suite.max_new_tokens
    if room < 1:
        raise DataError(
            f"a reply of {suite.max_new_tokens} tokens leaves no room for a prompt in {max_position} positions",
            "ask for shorter replies: --new-tokens N",
        )
    rejections: list[Rejection] = list(reading.rejections)
    unique, duplicates = merge_duplicates(reading.prompts)
    rejections += duplicates
    asked: list[PreparedPrompt] = []
    wanted = min(spec.limit, limit or spec.limit)
    looked_at = 0
    for prompt in sorted(unique, key=lambda one: order_key(one, seed)):
        if len(asked) == wanted:
            break
        looked_at += 1
        ids = screen(prompt, encoder, min(suite.max_prompt_tokens, room))
        if isinstance(ids, Rejection):
            rejections.append(ids)
            continue
        messages = [message.as_dict() for message in prompt.messages]
        asked.append(PreparedPrompt(id=prompt.id, domain=spec.name, messages=messages, token_ids=ids))
    if not asked:
        reasons = "; ".join(f"{row.source}:{row.line}: {row.reason}" for row in rejections[:3])
        raise DataError(
            f"set {spec.name!r}: none of {len(rejections)} rows can be asked{f' ({reasons})' if reasons else ''}",
            f"are these the files of {spec.origin}? leave the set out by naming others with --only",
        )
    origin = SetOrigin(
        title=spec.title,
        group=spec.group,
        licence=spec.licence,
        origin=spec.origin,
        files=dict(files),
        released=spec.rows,
        rows=len(reading.prompts) + len(reading.rejections),
        outside=reading.outside,
        rejected=count_reasons(rejections),
        asked=len(asked),
        beyond=len(unique) - looked_at,
        turns_left_out=reading.turns_left_out,
    )
    return PreparedSet(spec, origin, tuple(asked))


def evaluate_suite(
    load: Load,
    device: str,
    sets: Sequence[PreparedSet],
    inputs: SuiteInputs,
    out: Path,
    *,
    calibration: CalibrationReport | None = None,
    cost: StepCost | None = None,
    timed: Load | None = None,
    progress: Progress | None = None,
) -> SuiteReport:
    """Decode every set at every temperature, unless its records are there, and report.

    Writes `inputs.json`, `records/<set>/temperature-<t>.safetensors`, `per_position.csv`, `threshold_sweep.csv` and
    `suite.json` into `out`.

    Args:
        load: the target and the drafter in a dtype.
        device: on which `load` puts them.
        sets: at least one.
        inputs: of these sets.
        out: a folder that is new, empty, or holds unfinished or finished results of the same inputs.
        calibration: temperatures of the confidence head; None: only raw confidences.
        cost: of the machine's steps, for the scheduled arm of the throughput.
        timed: the same where speed is measured: tokens per second at temperature 0, on prompts of all sets in turn;
            None: they are not measured.
        progress: shows the decoding and the rounds.
    Raises:
        SettingsError: `out` holds something else, or results of other inputs.
        Interrupted: a stop was requested; finished sets stay.
    """
    progress = progress or Progress()
    _claim(out, inputs)
    settings = inputs.settings
    measured: dict[str, TemperatureMetrics] = {}
    results: dict[str, SuiteTemperature] = {}
    rows: list[SweepRow] = []
    gamma = 0
    for temperature in settings.temperatures:
        name = f"{temperature:g}"
        dtype = settings.dtype if temperature == 0 else settings.sampled_dtype
        records = _decode(load, dtype, sets, temperature, settings, out, progress)
        scales = temperatures_of(calibration, temperature)
        used = arithmetic(dtype, device.partition(":")[0])
        metrics = measure_temperature(records, (), used, temperatures=scales, seed=settings.seed)
        measured[name] = metrics
        rows += threshold_sweep(records, scales)
        results[name] = _summed_up(metrics, records, sets, scales, settings.seed)
        gamma = records.decoded[0].cycles.gamma
    write_position_csv(out / "per_position.csv", measured)
    write_sweep_csv(out / "threshold_sweep.csv", rows)
    speed = None
    if timed is not None:
        asked = [prompt for one in sets for prompt in one.prompts]
        target, drafter = timed(settings.throughput_dtype)
        speed = measure_throughput(target, drafter, asked, settings, calibration, cost, None, progress)
        write_model(out / "pareto.json", pareto([speed]))
    report = SuiteReport(
        inputs=inputs,
        gamma=gamma,
        policy="fixed",
        origins={one.spec.name: one.origin for one in sets},
        temperatures=results,
        throughput=speed,
    )
    write_model(out / REPORT, report)
    return report


def _claim(out: Path, inputs: SuiteInputs) -> None:
    """Say what the folder is for, or make sure that it is for this."""
    if out.exists() and not (out / INPUTS).is_file():
        if not out.is_dir() or any(out.iterdir()):
            raise SettingsError(f"{out} holds something else", "name a folder that is new or empty: --out DIR")
    elif out.exists():
        there = model_json(read_model(out / INPUTS, SuiteInputs, SettingsError, f"rm -r {out}, or --out DIR"))
        mine = model_json(inputs)
        if there != mine:
            different = ", ".join(sorted(key for key in {*there, *mine} if there.get(key) != mine.get(key)))
            raise SettingsError(
                f"{out} holds results of other inputs: {different} differ", f"rm -r {out}, or keep both: --out DIR"
            )
        return
    write_model(out / INPUTS, inputs)


def _decode(
    load: Load,
    dtype: DType,
    sets: Sequence[PreparedSet],
    temperature: float,
    settings: EvaluationSettings,
    out: Path,
    progress: Progress,
) -> RecordSet:
    """The records of all sets at one temperature; the models are loaded only if some are missing."""
    pair: tuple[Target, Drafter] | None = None
    parts: list[RecordSet] = []
    for one in sets:
        path = out / "records" / one.spec.name / f"temperature-{temperature:g}.safetensors"
        if not path.is_file():
            pair = pair or load(dtype)
            target, drafter = pair
            progress.start(f"{one.spec.name} at temperature {temperature:g}", len(one.prompts), unit="prompts")
            proposer = torch_proposer(drafter)
            decoded = decode_prompts(
                target, proposer, one.prompts, settings, temperature=temperature, progress=progress
            )
            write_records(path, decoded)
        parts.append(read_records(path))
    return RecordSet(
        tuple(name for part in parts for name in part.ids),
        tuple(domain for part in parts for domain in part.domains),
        tuple(decoded for part in parts for decoded in part.decoded),
    )


def _summed_up(
    metrics: TemperatureMetrics,
    records: RecordSet,
    sets: Sequence[PreparedSet],
    scales: Sequence[float] | None,
    seed: int,
) -> SuiteTemperature:
    known = [one.spec for one in sets if one.spec.name in metrics.domains]
    absent = {one.spec.name: metrics.absent[one.spec.name] for one in sets if one.spec.name in metrics.absent}
    groups = {}
    for group in dict.fromkeys(spec.group for spec in known):
        mean = mean_of_domains(records, [spec.name for spec in known if spec.group == group], seed=seed)
        if mean is not None:
            groups[group] = mean
    confidence = None
    if not all(one.cycles.confident for one in records.decoded):
        absent["confidence"] = NO_CONFIDENCE
    elif scales is None:
        absent["confidence"] = "no calibration for this temperature"
    elif known:
        arrays = calibration_records(records.decoded)
        confidence = assess(Records(**vars(arrays)), scales, seed=seed)
    mean = None
    if len(known) == len(sets):
        mean = mean_of_domains(records, [spec.name for spec in known], seed=seed)
    else:
        absent["mean"] = f"no figures for {', '.join(one.spec.name for one in sets if one.spec not in known)}"
    return SuiteTemperature(
        label=label_of(records.temperature),
        dtype=metrics.dtype,
        sets={spec.name: metrics.domains[spec.name] for spec in known},
        groups=groups,
        mean=mean,
        confidence=confidence,
        absent=absent,
    )
