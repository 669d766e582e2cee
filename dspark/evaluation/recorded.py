"""Confidence records that an engine made, for calibration: of a running SGLang server, or of files that one collected.

Records of another drafter or target would calibrate nothing and look as good as any. A running server is therefore held
against the build's own drafter, block by block; files are only as good as what the settings say was served.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dspark.calibration.records import Records
from dspark.config.models import CalibrationSettings, DType, ShardRecords
from dspark.corpus.prompts import PreparedPrompt
from dspark.drafters.base import Drafter
from dspark.drafters.checkpoint import write_union
from dspark.engines.replay import replay
from dspark.engines.sglang_client import SGLangClient
from dspark.engines.sglang_records import RecordedRequest, record_requests, records_of
from dspark.engines.sglang_shards import read_shards
from dspark.errors import DataError, ServiceError
from dspark.evaluation.decoding import first_prompts
from dspark.io.digest import digest_file
from dspark.io.progress import Progress
from dspark.targets.loading import Target
from dspark.targets.record import TargetRecord

COMPARED = 8  # requests that are decoded here as well
# An engine in half precision falls otherwise where two tokens are nearly as likely, and states a confidence a little
# off; another checkpoint of the same training run differs by more.
LEAST_TOKENS = 0.9  # of replies that are the target's greedy ones
LEAST_DRAFTS = 0.95  # that are the drafter's, up to the first of a block that is not
MOST_CONFIDENCE = 0.02  # median difference of confidences of the same drafts


def records_from_server(
    client: SGLangClient,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[PreparedPrompt],
    settings: CalibrationSettings,
    progress: Progress | None = None,
) -> Records:
    """Let a server answer the calibration prompts greedily, and take what it recorded of its drafts.

    Args:
        client: a server in mode `cap-accept`.
        target, drafter: what it is to serve, in float32; the first requests are held against them.
        prompts: of the calibration split.
        settings: how many prompts, how long the replies.
        progress: one task.
    Raises:
        DataError: the server has another gamma, drafter or target, or recorded nothing.
        PreflightError: it does not record what is needed.
        ServiceError: it does not answer.
    """
    progress = progress or Progress()
    served = client.served()
    gamma = drafter.config.gamma
    if served.gamma != gamma:
        blocks = "does not draft" if served.gamma is None else f"drafts blocks of {served.gamma}"
        raise DataError(f"SGLang at {client.address} {blocks}, the build's drafter has gamma {gamma}", _serve())
    chosen = first_prompts(prompts, settings.prompts_per_domain)
    progress.start("record confidences in SGLang", len(chosen), unit="prompts")
    requests = record_requests(client, [prompt.token_ids for prompt in chosen], settings.max_new_tokens, progress)
    records = records_of(requests, f"{served.engine}, mode cap-accept", target.eos_token_ids)
    if records.gamma != gamma:
        raise DataError(
            f"SGLang at {client.address} records blocks of {records.gamma}, the build's drafter has gamma {gamma}",
            _serve(),
        )
    require_same(client.address, target, drafter, [one for one in requests if one.blocks], settings.max_new_tokens)
    return records


def records_from_shards(
    source: ShardRecords,
    root: Path,
    drafter: Drafter,
    record: TargetRecord,
    *,
    exported: DType,
    work: Path,
) -> Records:
    """Read shards that are said to be of this drafter and target.

    Args:
        source: the folder, the traffic's temperature, and what was served.
        root: of the workspace.
        drafter: the build's.
        record: of the build's target.
        exported: dtype in which the drafter is served.
        work: a folder for the drafter's file as it is served.
    Raises:
        DataError: another drafter or target was served, or as `read_shards`.
    """
    if source.target_digest != record.digest:
        raise DataError(
            f"{source.folder} was collected with target {source.target_digest[:12]}, the build's target "
            f"{record.name} is {record.digest[:12]}",
            _collect(),
        )
    write_union(work / "drafter", drafter, record, dtype=exported, untrained=True)
    ours = digest_file(work / "drafter" / "model.safetensors")
    if source.drafter_weights_sha256 != ours:
        raise DataError(
            f"{source.folder} was collected with drafter {source.drafter_weights_sha256[:12]}, the build's drafter is "
            f"{ours[:12]}",
            _collect(),
        )
    return read_shards(root / source.folder, gamma=drafter.config.gamma, temperature=source.temperature)


def require_same(
    address: str, target: Target, drafter: Drafter, requests: Sequence[RecordedRequest], max_new_tokens: int
) -> None:
    """Refuse records of another target or drafter: the first requests are gone through again in torch.

    Args:
        address: of the server.
        target, drafter: in float32.
        requests: with blocks.
        max_new_tokens: limit of the replies.
    Raises:
        DataError: the replies are not the target's greedy ones, or the blocks not the drafter's.
        ServiceError: no block can be compared.
    """
    said, drafts = [], []
    gaps: list[float] = []
    for one in requests[:COMPARED]:
        said += _greedy(target, one.prompt, one.reply.token_ids)
        expected = replay(
            target, drafter, one.prompt, one.reply.token_ids, max_new_tokens, ended=one.reply.ended, cut=False
        )
        for block in one.blocks:
            if block.position not in expected.blocks:
                continue  # behind a token at which the two sides part
            ours = torch.sigmoid(torch.tensor(expected.confidences[block.position])).tolist()
            for mine, theirs, stated, shown in zip(
                expected.blocks[block.position], block.drafted, ours, block.confidences, strict=True
            ):
                drafts.append(mine == theirs)
                gaps.append(abs(stated - shown))
                if mine != theirs:
                    break  # what follows was drafted upon another token
    if said and np.mean(said) < LEAST_TOKENS:
        raise DataError(
            f"SGLang at {address} serves another target: {np.mean(said):.0%} of its tokens are those of "
            f"{target.record.name}",
            _serve(),
        )
    if not drafts:
        raise ServiceError(f"SGLang at {address} recorded no block that can be compared", _serve())
    if np.mean(drafts) < LEAST_DRAFTS or np.median(gaps) > MOST_CONFIDENCE:
        raise DataError(
            f"SGLang at {address} serves another drafter: {np.mean(drafts):.0%} of its drafts are those of the "
            f"build's drafter, confidences are {np.median(gaps):.3f} apart (median)",
            _serve(),
        )


@torch.inference_mode()
def _greedy(target: Target, prompt: Sequence[int], reply: Sequence[int]) -> list[bool]:
    """Whether each token of a reply is the target's likeliest one there."""
    ids = torch.tensor([[*prompt, *reply]], device=target.device)
    hidden = target.last_hidden(ids)[0, len(prompt) - 1 : -1]
    equal: list[bool] = (target.logits(hidden).argmax(-1) == ids[0, len(prompt) :]).tolist()
    return equal


def _serve() -> str:
    return "serve the package of this build, or decode here: --set calibration.records.kind=decoding"


def _collect() -> str:
    return (
        "collect again with this build's package (engines/sglang/sts.json names both digests), or decode here: "
        "--set calibration.records.kind=decoding"
    )
