"""`dspark plan --estimate`: what a build would take, whether its target is here or not. Nothing is fetched or written.

Arithmetic and measurement are in `profiling`; here is where their numbers come from.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark.config.build import FOLDERS, ResolvedBuild
from dspark.config.models import DType, FolderSource, RandomSource
from dspark.corpus.expected import expected_prompts
from dspark.corpus.summary import PromptsSummary
from dspark.device import accelerator
from dspark.drafters.sizes import DrafterSize, drafter_size
from dspark.errors import DataError, SettingsError
from dspark.features.sizes import deepspec_bytes_per_token
from dspark.io.jsonfile import read_model
from dspark.processor import arithmetic
from dspark.profiling.estimate import (
    HOST_PARTS,
    Chunks,
    FeatureBytes,
    Job,
    Rates,
    SplitTokens,
    calibration_seconds,
    feature_bytes,
    features_memory,
    features_seconds,
    responses_memory,
    responses_seconds,
    training_memory,
    training_seconds,
)
from dspark.targets.completion import complete
from dspark.targets.layout import read_config
from dspark.targets.record import read_record, spread_taps, taps_mistake
from dspark.targets.shape import TargetShape, differences, shape_of
from dspark.workspace.fetch import is_current
from dspark.workspace.layout import Workspace
from dspark.workspace.memory import usable_memory
from dspark.workspace.stores import feature_store, store_settings

NOT_ESTIMATED = ("prompts", "profile", "evaluate", "export", "certify", "package")


@dataclass(frozen=True)
class StageMemory:
    """Peak memory of a stage.

    Attributes:
        device: where most of it is.
        bytes: on that device.
        available: that the device has in all.
        host_bytes: in the machine's memory beside it; 0 if the device is the machine itself.
        parts: all of it, by name.
    """

    device: str
    bytes: int
    available: int
    host_bytes: int
    parts: dict[str, int]

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.bytes <= self.available


@dataclass(frozen=True)
class Estimate:
    """What a build would take.

    Attributes:
        config_from: where the target's size is from.
        parameters: of the target.
        weight_bytes: of the target, in the dtype that it computes in here.
        dtype: that dtype.
        drafter: the size of the drafter; its parameters are `drafter_parameters`.
        splits: tokens of train and dev.
        tokens_from: where these are from.
        features: per dtype of storage.
        chosen: mode and dtype of the build.
        deepspec: bytes that DeepSpec's cache takes per token.
        store: the folder where features lie.
        free_bytes: on its disk.
        memory: per stage.
        seconds: per stage, at least.
        rates: that the seconds rest on.
    """

    build: str
    target: str
    config_from: str
    parameters: int
    weight_bytes: int
    dtype: DType
    drafter: DrafterSize
    splits: Mapping[str, SplitTokens]
    tokens_from: str
    features: tuple[FeatureBytes, ...]
    chosen: tuple[str, str]
    deepspec: int
    store: Path
    free_bytes: int
    memory: dict[str, StageMemory]
    seconds: dict[str, float]
    rates: Rates

    @property
    def tokens(self) -> int:
        """Of which features are made."""
        return sum(split.tokens for split in self.splits.values())

    def as_json(self) -> dict[str, Any]:
        """For `--json`; bytes, seconds, tokens."""
        return {
            "schema": "dspark/estimate/1",
            "build": self.build,
            "target": self.target,
            "config_from": self.config_from,
            "parameters": self.parameters,
            "weight_bytes": self.weight_bytes,
            "dtype": self.dtype,
            "drafter_parameters": self.drafter.parameters,
            "splits": {name: {**asdict(split), "tokens": split.tokens} for name, split in self.splits.items()},
            "tokens": self.tokens,
            "tokens_from": self.tokens_from,
            "features": {
                "mode": self.chosen[0],
                "dtype": self.chosen[1],
                "store": str(self.store),
                "free_bytes": self.free_bytes,
                "bytes": [{**asdict(row), "cached_fits": row.cached <= self.free_bytes} for row in self.features],
                "deepspec": {"bytes_per_token": self.deepspec, "cached": self.deepspec * self.tokens},
            },
            "memory": {name: {**asdict(stage), "fits": stage.fits} for name, stage in self.memory.items()},
            "seconds_at_least": {name: round(seconds, 1) for name, seconds in self.seconds.items()},
            "not_estimated": list(NOT_ESTIMATED),
            "rates": asdict(self.rates),
        }


def estimate(
    workspace: Workspace,
    chosen: ResolvedBuild,
    tokens: int | None = None,
    *,
    measure: Callable[[Job], Rates] | None = None,
) -> Estimate:
    """Estimate a build.

    Args:
        tokens: of train and dev together, instead of those that follow from the prompts.
        measure: how the machine's rates are found; None: measured now, in a few seconds.
    Raises:
        SettingsError: nothing tells the target's size; says how to get it. Or the catalogue's config is another
            model's, or taps do not fit the target.
        SettingsError, PreflightError, DataError: a domain cannot be read, or `DSPARK_DEVICE` names what is not there.
    """
    spec = chosen.build.target
    shape, taps, limit, config_from = target_shape(workspace, chosen)
    splits, longest_prompt, tokens_from = _splits(workspace, chosen, tokens, limit)
    settings = chosen.build
    longest = longest_prompt + settings.corpus.responses.max_new_tokens
    device = stage_device()
    job = Job(
        shape=shape,
        drafter=drafter_size(shape, taps, settings.drafter),
        taps=taps,
        splits=splits,
        longest=longest if limit is None else min(longest, limit),
        longest_prompt=longest_prompt,
        corpus=settings.corpus,
        block=settings.drafter,
        training=settings.training,
        calibration=settings.calibration,
        chunks=_chunks(),
        device=device,
        training_device=device,
        dtype=arithmetic(spec.dtype, device),
        precision=arithmetic(settings.training.precision, device),
        read_budget=store_settings(workspace).read_budget_mib << 20,
    )
    if measure is None:
        from dspark.profiling.rates import measure_rates

        measure = measure_rates
    rates = measure(job)
    memory = {
        "responses": _stage_memory(responses_memory(job), device),
        "features": _stage_memory(features_memory(job), device),
    }
    seconds = {"responses": responses_seconds(job, rates), "features": features_seconds(job, rates)}
    if settings.training.imported is None:  # an imported drafter is not trained
        memory["train"] = _stage_memory(training_memory(job), device)
        seconds["train"] = training_seconds(job, rates)
    seconds["calibrate"] = calibration_seconds(job, rates)
    store = feature_store(workspace)
    return Estimate(
        build=chosen.name,
        target=spec.name,
        config_from=config_from,
        parameters=shape.parameters,
        weight_bytes=memory["responses"].parts["weights"],
        dtype=job.dtype,
        drafter=job.drafter,
        splits=splits,
        tokens_from=tokens_from,
        features=feature_bytes(job),
        chosen=(settings.corpus.features.mode, settings.corpus.features.dtype),
        deepspec=deepspec_bytes_per_token(shape.hidden_size, taps),
        store=store,
        free_bytes=_free(store),
        memory=memory,
        seconds=seconds,
        rates=rates,
    )


def target_shape(workspace: Workspace, chosen: ResolvedBuild) -> tuple[TargetShape, int, int | None, str]:
    """A target's shape, how many taps it has, its longest sequence where known, and where that is from.

    The model itself is asked if it is here; a config that the catalogue declares is held against it.

    Raises:
        SettingsError: see `estimate`.
    """
    spec = chosen.build.target
    file = f"{FOLDERS['target']}/{spec.name}.yaml"
    declared = None if spec.config is None else shape_of(complete(spec.config, f"{file}: config"))
    limit: int | None = None
    if is_current(workspace, spec):
        record = read_record(workspace.target_record(spec.name))
        text, found_in = record.text_config, "the fetched model"
    elif isinstance(spec.source, FolderSource):
        folder = (workspace.root / Path(spec.source.path).expanduser()).resolve()
        text, found_in = complete(read_config(folder), f"{folder / 'config.json'}"), "the model's folder"
    elif isinstance(spec.source, RandomSource):
        text, found_in = complete(spec.source.config, f"{file}: source.config"), file
    else:
        text, found_in = {}, file
    if text:
        shape, limit = shape_of(text), int(text["max_position_embeddings"])
        if declared is not None and (wrong := differences(declared, shape)):
            raise SettingsError(f"{file}: config: {'; '.join(wrong)}", "correct it, or leave config out")
    elif declared is not None:
        shape = declared
    else:
        raise SettingsError(
            f"target {spec.name!r} is not fetched and {file} does not tell its size",
            f"dspark targets fetch {spec.name}, or give {file} a `config:` with the keys of the model's config.json "
            f"(docs/how-to/estimate.md)",
        )
    taps = spec.taps if spec.taps is not None else spread_taps(len(shape.layers))
    if reason := taps_mistake(taps, len(shape.layers)):
        raise SettingsError(f"{file}: {reason}", f"dspark targets show {spec.name}")
    return shape, len(taps), limit, found_in


def stage_device() -> str:
    """Where the target runs in stages and drafters are trained: torch's type of the device.

    Raises:
        PreflightError: `DSPARK_DEVICE` asks for a GPU, and torch sees none.
    """
    return accelerator().partition(":")[0]


def _splits(
    workspace: Workspace, chosen: ResolvedBuild, tokens: int | None, limit: int | None
) -> tuple[dict[str, SplitTokens], int, str]:
    """Tokens of train and dev, tokens of the longest prompt, and where they are from."""
    corpus = chosen.build.corpus
    new, most = corpus.responses.max_new_tokens, corpus.prompts.max_prompt_tokens
    if limit is not None:
        most = max(1, min(most, limit - 1))
    if tokens is not None:
        answered = min(tokens, math.ceil(tokens / (most + new)) * new)
        sequences = math.ceil(tokens / (most + new))
        return {"train": SplitTokens(sequences, tokens - answered, answered)}, most, "given"
    summary = _summary(workspace, chosen)
    times = {"train": corpus.responses.samples_per_prompt, "dev": 1}
    if summary is not None:
        counted = {split: (summary.splits[split].prompts, summary.splits[split].tokens) for split in times}
        longest, origin = most, "at most, from the corpus's prompts"
    else:
        domains = [*chosen.domains, *chosen.evaluation_domains]
        found = expected_prompts(corpus, domains, workspace.root / FOLDERS["domain"])
        counted = {split: (found[split].prompts, found[split].tokens) for split in times}
        longest = min(most, max(found[split].longest for split in times))
        origin = "at most, from the domains' texts (a token a byte)"
    splits = {
        split: SplitTokens(count * times[split], count_tokens * times[split], count * times[split] * new)
        for split, (count, count_tokens) in counted.items()
    }
    return splits, longest, origin


def _summary(workspace: Workspace, chosen: ResolvedBuild) -> PromptsSummary | None:
    """The summary of the corpus's prompts, if they were made with the settings at hand."""
    corpus = chosen.build.corpus
    try:
        found = read_model(workspace.root / "corpora" / corpus.name / "prompts" / "summary.json", PromptsSummary)
    except DataError:
        return None
    made = (found.seed, found.shares, found.per_domain, found.max_prompt_tokens, set(found.domains))
    asked = (corpus.prompts.seed, corpus.prompts.shares, corpus.prompts.per_domain, corpus.prompts.max_prompt_tokens)
    return found if made == (*asked, {*corpus.domains, *corpus.evaluation_domains}) else None


def _chunks() -> Chunks:
    from dspark.features.forward import LOGITS_BYTES
    from dspark.targets.generation import PREFILL_TOKENS
    from dspark.training.development import DEV_ANCHORS
    from dspark.training.losses import ROWS

    return Chunks(PREFILL_TOKENS, LOGITS_BYTES, ROWS, DEV_ANCHORS)


def _stage_memory(parts: dict[str, int], device: str) -> StageMemory:
    host = 0 if device == "cpu" else sum(size for name, size in parts.items() if name in HOST_PARTS)
    return StageMemory(device, sum(parts.values()) - host, _memory_of(device), host, parts)


def _memory_of(device: str) -> int:
    """Bytes of memory of a device; of the machine, what this process may have."""
    if device != "cpu":
        import torch

        return int(torch.cuda.mem_get_info()[1])
    return usable_memory()


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
