"""Certify an engine through its servers, one for each way of decoding: counters, texts, and rounds under load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.config.models import EvaluationSettings, ServingProfile
from dspark.corpus.prompts import PreparedPrompt
from dspark.decoding.policies import Fixed, NoDrafts, parse_policy
from dspark.drafters.base import Drafter
from dspark.engines.agreement import AgreementReport
from dspark.engines.client import Completion, Fleet, Streamed, Together
from dspark.evaluation.counters import (
    SHORTENED,
    Asked,
    Verdict,
    compare_counters,
    judge_counters,
    measure_counters,
    replay_all,
)
from dspark.evaluation.decoding import first_prompts, spread_prompts, that_fit
from dspark.evaluation.entries import Engine, measured_entry
from dspark.evaluation.entry import CertificateEntry, Status
from dspark.evaluation.recommendation import note_halves, recommend
from dspark.evaluation.rounds import NONE, Arm, Comparison, Request, Round, run_in_turn
from dspark.evaluation.texts import compare_texts
from dspark.io.progress import Progress
from dspark.targets.loading import Target

BURST = 1e-3  # seconds: tokens that arrive closer than that came with one cycle
P_MIN = 0.5


@dataclass(frozen=True)
class Questions:
    """What the servers are asked for.

    Attributes:
        alone: prompts that are decoded one after the other, for counters and texts.
        together: token ids of the prompts that are decoded at the same time, by concurrency.
        longest: positions of the longest prompt with its reply.
        left_out: prompts that would be decoded alone, but do not fit.
    """

    alone: tuple[PreparedPrompt, ...]
    together: Mapping[int, Sequence[Sequence[int]]]
    longest: int
    left_out: int = 0

    @classmethod
    def of(
        cls,
        profile: ServingProfile,
        prompts: Sequence[PreparedPrompt],
        settings: EvaluationSettings,
        prompts_per_domain: int,
        rooms: Iterable[int | None] = (),
    ) -> Questions:
        """The first prompts of each domain alone, and prompts that take turns among the domains together.

        Args:
            rooms: positions that a request may have; prompts that do not fit with their reply are left out.
        Raises:
            DataError: too few fit.
        """
        reply, rooms = max(settings.max_new_tokens, settings.throughput_new_tokens), tuple(rooms)
        alone, left_out = that_fit(first_prompts(prompts, prompts_per_domain), _tokens, reply, rooms)
        prompts, _ = that_fit(prompts, _tokens, reply, rooms)
        together = {
            concurrency: [
                one.token_ids for one in spread_prompts(prompts, max(settings.throughput_prompts, concurrency))
            ]
            for concurrency in sorted(profile.certify_concurrency)
        }
        everyone = [*(one.token_ids for one in alone), *(ids for group in together.values() for ids in group)]
        return cls(tuple(alone), together, max(map(len, everyone)) + reply, left_out)


def _tokens(prompt: PreparedPrompt) -> int:
    return len(prompt.token_ids)


def certify_servers(
    fleet: Fleet,
    arms: Sequence[Arm],
    questions: Questions,
    profile: ServingProfile,
    fingerprint: Mapping[str, Any],
    target: Target,
    drafter: Drafter,
    settings: EvaluationSettings,
    *,
    cut: bool,
    export: AgreementReport | None = None,
    progress: Progress | None = None,
) -> CertificateEntry:
    """Measure acceptance, agreement with the loop, equality of texts and load points in the engine itself.

    Args:
        fleet: a server for each arm.
        arms: plain decoding and whole blocks among them.
        profile: its concurrencies are in `questions`; its name, dtype and threads are reported.
        fingerprint: of the machine and engine (`profiling.fingerprint`).
        target: in float32, for the replay.
        drafter: as the servers have it, in float32.
        settings: lengths and rounds.
        cut: whether the engine cuts the last block of a reply (`engines.replay`).
        export: what an export gate found before.
        progress: shows the decoding and the rounds.
    Raises:
        DataError: too few prompts for a concurrency, or the engine verified no block at all.
        ServiceError: a server does not answer.
    """
    progress = progress or Progress()
    gamma, seed = drafter.config.gamma, settings.seed
    drafted, plain = (
        _decode(fleet, name, questions.alone, settings.max_new_tokens, progress) for name in (Fixed().name, NONE)
    )
    note_halves(settings.throughput_rounds, progress)
    rounds = len(questions.together) * len(arms) * settings.throughput_rounds
    progress.start("measure load", rounds, unit="rounds")
    comparisons = [
        compare_served(
            fleet,
            arms,
            group,
            concurrency,
            profile=profile,
            threads=int(fingerprint["threads"]),
            settings=settings,
            progress=progress,
        )
        for concurrency, group in questions.together.items()
    ]
    asked = replay_all(
        target,
        drafter,
        [one.token_ids for one in questions.alone],
        drafted,
        max_new_tokens=settings.max_new_tokens,
        n_max=gamma,
        cut=cut,
        progress=progress,
    )
    agreement = compare_counters(asked, seed=seed)
    lossless = compare_texts(target, questions.alone, drafted, plain)
    return measured_entry(
        Engine(profile, fingerprint, target.record.thinking_mode),
        _status(*judge_counters(agreement), lossless.result == "inconclusive", drafted),
        {
            domain: measure_counters([one.reply.counters for one in group], seed=seed)
            for domain, group in _by_domain(questions.alone, asked).items()
        },
        comparisons,
        domains=[one.domain for one in questions.alone],
        prompts=len(questions.alone),
        left_out=questions.left_out,
        recommended=recommend(comparisons, gamma),
        settings=settings,
        lossless=lossless,
        agreement=agreement,
        export=export,
    )


def _status(
    verdict: Verdict, reason: str | None, undecided: bool, drafted: Sequence[Completion]
) -> tuple[Status, str | None]:
    if any(reply.shortened for reply in drafted):
        return "inconclusive", SHORTENED
    if verdict != "agrees":
        return verdict, reason
    return ("inconclusive", "losslessness was not shown") if undecided else ("measured", None)


def _decode(
    fleet: Fleet, name: str, prompts: Sequence[PreparedPrompt], max_new_tokens: int, progress: Progress
) -> list[Completion]:
    """Every prompt by itself, so that what was counted is this prompt's."""
    progress.start(f"decode in the engine, {name}", len(prompts), unit="prompts")
    replies = []
    for prompt in prompts:
        replies.append(fleet[name].complete(prompt.token_ids, max_new_tokens))
        progress.advance()
    return replies


def _by_domain(prompts: Sequence[PreparedPrompt], asked: Sequence[Asked]) -> dict[str, list[Asked]]:
    groups: dict[str, list[Asked]] = {}
    for prompt, one in zip(prompts, asked, strict=True):
        groups.setdefault(prompt.domain, []).append(one)
    return {domain: group for domain, group in sorted(groups.items()) if any(one.reply.counters.steps for one in group)}


def served_arms(profile: ServingProfile, gamma: int, *, confidence: bool = True) -> list[Arm]:
    """Plain decoding, whole blocks, and the other policies of a profile, by default every shorter block and one p_min.

    Args:
        confidence: whether the drafter has a confidence head, which p_min needs.
    Raises:
        SettingsError: a policy that does not exist.
    """
    shorter = [f"fixed({k})" for k in range(1, gamma)]
    names = profile.policies or (*shorter, *([f"threshold({P_MIN:g})"] if confidence else []))
    policies = [Fixed(), *(parse_policy(name) for name in names if name not in (NONE, Fixed().name))]
    return [Arm(NONE, None, NoDrafts()), *(Arm(policy.name, None, policy) for policy in policies)]


def request_of(streamed: Streamed) -> Request:
    """A request as it came in: tokens that arrive together came with one cycle, the first one with the prefill."""
    if not streamed.token_ids:
        return Request((), streamed.whole_seconds, np.zeros(0), np.zeros(0, np.int32))
    seconds = np.array(streamed.seconds)
    gaps = np.diff(seconds)
    # The first cycle begins with the second token, however soon that came.
    begins = np.flatnonzero((gaps > BURST) | (np.arange(len(gaps)) == 0))
    ends = np.append(begins[1:], len(gaps)) if len(begins) else begins
    cycle_seconds = np.array([gaps[begin:end].sum() for begin, end in zip(begins, ends, strict=True)])
    return Request(streamed.token_ids, float(seconds[0]), cycle_seconds, (ends - begins).astype(np.int32))


def round_of(group: int, done: Together) -> Round:
    """A round as the engine reports it; the time that it does not spend on drafting is verification's."""
    requests = tuple(request_of(one) for one in done.replies)
    cycles = sum(len(one.emitted) for one in requests)
    verified = done.counters.drafted
    if done.drafting is None:
        return Round(group, done.seconds, requests, cycles, verified, None, None)
    calls = done.drafting.calls
    drafting = done.drafting.seconds / calls * cycles if calls else 0.0
    whole = sum(float(one.cycle_seconds.sum()) for one in requests)
    return Round(group, done.seconds, requests, cycles, verified, drafting, max(whole - drafting, 0.0))


def compare_served(
    servers: Fleet,
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    concurrency: int,
    *,
    profile: ServingProfile,
    threads: int,
    settings: EvaluationSettings,
    progress: Progress,
) -> Comparison:
    """Interleaved rounds of all servers at one load.

    Args:
        servers: one for each arm, by its name.
        prompts: token ids; at least `concurrency`.
        profile: whose dtype is reported.
        threads: that the servers run with.
        settings: rounds and lengths.
        progress: advanced by one per arm and round; the caller starts the task.
    Raises:
        DataError: too few prompts.
    """

    def run(arm: Arm, group: int, tokens: int) -> Round:
        members = prompts[group * concurrency : (group + 1) * concurrency]
        return round_of(group, servers.together(arm.name, members, tokens))

    rounds = run_in_turn(
        arms,
        run,
        prompts=len(prompts),
        concurrency=concurrency,
        rounds=settings.throughput_rounds,
        max_new_tokens=settings.throughput_new_tokens,
        progress=progress,
    )
    return Comparison(
        arms=tuple(arms),
        rounds=rounds,
        temperature=0.0,
        dtype=profile.dtype,
        threads=threads,
        concurrency=concurrency,
        prompts=min(settings.throughput_rounds, len(prompts) // concurrency) * concurrency,
        max_new_tokens=settings.throughput_new_tokens,
        seed=settings.seed,
    )
