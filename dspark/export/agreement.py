"""The export gate of llama.cpp: does the engine draft, block by block, what the trained drafter drafts in torch?

Everything runs in float32, weights, keys, values and (without flash attention, which on a CPU does not) sums, so that
nothing but the export can differ: all draft tokens have to be equal and the engine's counters exactly those of the
sequential loop, cut at a request's end as llama.cpp cuts them. Acceptance alone hides shifted taps, a wrong RoPE base
and a wrong mask token (package.md), so files with exactly these faults are put through the same comparison, which has
to refuse them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch

from dspark.decoding.drafting import proposable
from dspark.drafters.base import Drafter
from dspark.drafters.checkpoint import served_form
from dspark.drafters.kinds import require_dspark
from dspark.engines.agreement import AgreementReport, Count, EngineAgreement, Setting
from dspark.engines.client import Completion
from dspark.engines.counters import Counters, summed
from dspark.engines.llamacpp import DRAFTS_SHOWN, LlamaCppServer, LlamaCppSettings, engine_version
from dspark.engines.llamacpp_loop import expected_request
from dspark.engines.replay import ExpectedRequest
from dspark.errors import DataError, GateError, ServiceError
from dspark.export.gguf import Fault, read_drafter_gguf, write_drafter_gguf, write_with_fault
from dspark.export.report import judge_controls
from dspark.io.gguffile import MASK, GGUFFile, Key, read_gguf
from dspark.io.jsonfile import write_model
from dspark.io.progress import Progress
from dspark.targets.loading import Target

FEWEST_PROMPTS = 8
_CONTROL_TOKEN = 3  # llama.cpp's kind of a token that is no text


def agree_with_llamacpp(
    target: Target,
    drafter: Drafter,
    target_gguf: Path,
    prompts: Sequence[Sequence[int]],
    work: Path,
    *,
    max_new_tokens: int = 24,
    threads: int = 1,
    progress: Progress | None = None,
) -> AgreementReport:
    """Compare llama.cpp's drafts with torch's, of the right file and of some that are wrong in one way each.

    A wrong file is done with at the first prompt that shows it to be wrong.

    Args:
        target: in float32.
        drafter: trained for it; its weights are used in float32. A union checkpoint of a reduced vocabulary is compared
            with the reduced one, which is what llama.cpp is given.
        target_gguf: the same target, F32.
        prompts: token ids, at least 8 of them.
        work: folder for the drafter's files and the engine's logs.
        max_new_tokens: of each reply.
        threads: of the engine.
        progress: advanced after each file.
    Returns:
        the report; `judge_agreement` says whether it will do.
    Raises:
        DataError: too few prompts, or a target that is not in float32.
        SettingsError: a kind of drafter that llama.cpp is not given here.
        PreflightError: xllamacpp or gguf is not installed.
        ServiceError: the engine does not run.
    """
    engine = engine_version()
    if len(prompts) < FEWEST_PROMPTS:
        raise DataError(f"{len(prompts)} prompts are too few to judge an export, {FEWEST_PROMPTS} are needed")
    stored = read_gguf(target_gguf)
    if target.dtype != torch.float32 or set(stored.types.values()) != {"F32"}:
        raise DataError(
            f"target {target.record.name}: both sides of the comparison must be in float32 "
            f"(torch has {target.dtype}, {target_gguf.name} has {', '.join(sorted(set(stored.types.values())))})",
            "load the target with dtype float32 and write its GGUF file as F32",
        )
    exact = proposable(require_dspark(copy.deepcopy(drafter), "this comparison").float().cpu().eval())
    right = work / "drafter.gguf"
    write_drafter_gguf(right, exact, stored)
    read_drafter_gguf(right, served_form(exact).config, stored)
    files = {"": right}
    for name, fault in faults(exact).items():
        files[name] = work / f"fault-{len(files)}.gguf"
        write_with_fault(files[name], exact, stored, fault)
    progress = progress or Progress()
    progress.start("llama.cpp", 1 + len(files), unit="runs")
    expected = [expected_request(target, exact, prompt, max_new_tokens) for prompt in prompts]
    progress.advance()
    results = {}
    for name, path in files.items():
        settings = LlamaCppSettings(
            target_gguf,
            path,
            n_max=exact.config.gamma,
            context=max(map(len, prompts)) + max_new_tokens,
            threads=threads,
            memory="F32",
            flash_attention=False,
            log_level=DRAFTS_SHOWN,
        )
        results[name] = _run(
            settings, path.with_suffix(".log"), prompts, expected, stored, max_new_tokens, whole=not name
        )
        progress.advance()
    return AgreementReport(
        engine=engine,
        setting=Setting(prompts=len(prompts), max_new_tokens=max_new_tokens, n_max=exact.config.gamma),
        agreement=results.pop(""),
        negative_controls=results,
    )


def faults(drafter: Drafter) -> dict[str, Fault]:
    """What makes a file wrong in one way each; llama.cpp loads all of these files without a word."""
    config = drafter.config
    mask = 0 if config.mask_token_id != 0 else 1
    theta = float(config.rope["rope_theta"]) / 10
    found = {
        "taps without + 1": Fault({"dflash.target_layers": Key(list(config.taps), "INT32")}),
        "RoPE theta / 10": Fault({"dflash.rope.freq_base": Key(theta, "FLOAT32")}),
    }
    if config.gamma > 1:  # a block of one is its anchor: there is no mask token in it, and without it nothing
        found[f"mask token {mask}"] = Fault({MASK: Key(mask, "UINT32")})
        found["sample_from_anchor false"] = Fault({"dflash.sample_from_anchor": Key(False, "BOOL")})
    if config.draft_vocab_size is not None:
        found["d2t shifted by one"] = Fault(shift=1)
    return found


def judge_agreement(report: AgreementReport, kept: Path | None = None) -> None:
    """Refuse an export that drafts otherwise in the engine, or a comparison that could not tell.

    Args:
        kept: where the report is written, to be named if it refuses; None: nowhere.

    Raises:
        GateError: the engine differs, or a faulty file passes.
    """
    if kept is not None:
        write_model(kept, report)
    result = report.agreement
    if result.verdict != "equal":
        counts = ", ".join(
            f"{name} {count.engine} instead of {count.torch}"
            for name, count in result.counts.items()
            if not count.equal
        )
        raise GateError(
            f"llama.cpp: {result.differing_blocks} of {result.blocks} draft blocks and {result.differing_replies} of "
            f"{report.setting.prompts} replies differ from torch ({result.first_difference or counts})",
            f"this is a fault of the export or of this engine's version; report it{f' with {kept}' if kept else ''}",
        )
    judge_controls(report.negative_controls, "llama.cpp")


def _run(
    settings: LlamaCppSettings,
    log: Path,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[ExpectedRequest],
    target: GGUFFile,
    max_new_tokens: int,
    *,
    whole: bool,
) -> EngineAgreement:
    """Compare a file on all prompts, or only up to the first one that shows it to be wrong."""
    kinds = target.value("tokenizer.ggml.token_type")
    replies: list[Completion] = []
    with LlamaCppServer(settings, log) as server:
        for prompt in prompts:
            replies.append(server.complete(prompt, max_new_tokens))
            found = compare_requests(prompts[: len(replies)], expected[: len(replies)], replies, kinds)
            if found.verdict == "different" and not whole:
                break
        if server.counters().steps == 0:
            raise ServiceError(f"llama.cpp drafted nothing with {settings.drafter}", f"whole log: {log}")
    return found


def compare_requests(
    prompts: Sequence[Sequence[int]],
    expected: Sequence[ExpectedRequest],
    replies: Sequence[Completion],
    kinds: Sequence[int],
) -> EngineAgreement:
    """Compare replies and blocks, matched by the position of their anchors.

    Args:
        kinds: of each token, as llama.cpp numbers them. It ends replies at tokens of its own choice besides the
            target's, which have to be control tokens.
    """
    blocks = differing = tokens = wrong_replies = 0
    first = None
    counted, wanted = Counters(), Counters()
    for number, (prompt, torch_side, reply) in enumerate(zip(prompts, expected, replies, strict=True)):
        length = len(reply.token_ids)
        if reply.ended:
            torch_side = torch_side.until(len(prompt) + length)
        if not _same_reply(torch_side.token_ids, reply, kinds):
            wrong_replies += 1
            first = first or f"prompt {number}: its reply"
        drafted = {block.position: block for block in reply.blocks}
        for position in sorted(drafted.keys() | torch_side.blocks.keys()):
            mine, theirs = torch_side.blocks.get(position), drafted.get(position)
            blocks += 1
            tokens += len(mine or ())
            if (
                mine is None
                or theirs is None
                or theirs.tokens != mine
                or theirs.offered != torch_side.offered[position]
            ):
                differing += 1
                said = theirs and list(theirs.tokens[: theirs.offered])
                first = first or f"prompt {number}, block at {position}: {said} instead of {mine and list(mine)}"
        counted, wanted = summed((counted, reply.counters)), summed((wanted, torch_side.counters))
    counts = {
        "steps": Count(engine=counted.steps, torch=wanted.steps),
        "drafted": Count(engine=counted.drafted, torch=wanted.drafted),
        "accepted": Count(engine=counted.accepted, torch=wanted.accepted),
    }
    for place in range(max(len(counted.per_position), len(wanted.per_position))):
        counts[f"accepted at position {place + 1}"] = Count(
            engine=sum(counted.per_position[place : place + 1]), torch=sum(wanted.per_position[place : place + 1])
        )
    equal = not differing and not wrong_replies and all(count.equal for count in counts.values())
    return EngineAgreement(
        blocks=blocks,
        tokens=tokens,
        differing_blocks=differing,
        differing_replies=wrong_replies,
        counts=counts,
        verdict="equal" if equal else "different",
        first_difference=first,
    )


def _same_reply(expected: tuple[int, ...], reply: Completion, kinds: Sequence[int]) -> bool:
    length = len(reply.token_ids)
    if reply.token_ids != expected[:length]:
        return False
    if reply.ended:
        return length < len(expected) and kinds[expected[length]] == _CONTROL_TOKEN
    return length == len(expected)
