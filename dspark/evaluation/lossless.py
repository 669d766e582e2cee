"""Losslessness: drafts must not change what the target says.

At temperature 0 every emitted sequence is scored in one plain forward pass, without a cache, a batch or a draft. At
temperature 1 the whole loop is enumerated on a tiny vocabulary and its law compared with the closed form. A check that
saw no draft proves nothing and says so (package.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dspark.config.models import MarkovType
from dspark.decoding.cache import SlotCache
from dspark.decoding.loop import decode
from dspark.decoding.policies import Logits, Policy, Rows, parse_policy
from dspark.decoding.prefixes import Counts
from dspark.decoding.proposers import torch_proposer
from dspark.decoding.records import Decoded
from dspark.errors import SettingsError
from dspark.evaluation.enumeration import EnumeratingDraws, enumerate_law, largest_difference, target_law
from dspark.evaluation.results import Difference, EnumeratedCase, GreedyLossless, SampledLossless
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.io.progress import Progress
from dspark.scheduling.cost import CostCurve
from dspark.scheduling.prefix import PrefixScheduler
from dspark.targets.loading import Target

LARGEST_EPSILON = 1e-3  # of logits; more than rounding is not a near-tie
# Of probabilities. Everything runs in float64 but transformers' norms, which round to float32: on some processors a
# batch is rounded otherwise than a single row (2e-10 was seen). A wrong rule moves probabilities by hundredths.
ENUMERATION_TOLERANCE = 1e-8
# Family, policy, tokens of the joint law, vocabulary, draft vocabulary. Blocks are of two, so four tokens (the
# prefill's, two drafts and what follows them) are the fewest that show the bonus token of a block that was accepted
# whole. A delayed step is sized two steps before, and steps that were sized so size others: five tokens are four steps.
CASES: tuple[tuple[str, str, int, int, tuple[int, ...] | None], ...] = (
    ("llama", "fixed", 3, 3, None),
    ("qwen3", "fixed", 4, 3, (0, 2)),
    ("llama", "threshold(0.5)", 3, 3, None),
    ("llama", "scheduled", 3, 3, None),
    ("llama", "scheduled-delayed", 5, 2, None),
)


def check_greedy(
    target: Target,
    prompts: Sequence[Sequence[int]],
    ids: Sequence[str],
    decoded: Sequence[Decoded],
    progress: Progress | None = None,
) -> GreedyLossless:
    """Score what was emitted at temperature 0.

    Args:
        target: in float32 (or better), the one that decoded.
        prompts: token ids of each prompt.
        ids: name of each prompt.
        decoded: what was emitted after each prompt.
        progress: advanced by one per prompt; the caller starts the task.
    Raises:
        SettingsError: a target in half precision, whose ties would blur the comparison, or text that was sampled.
    """
    if target.dtype not in (torch.float32, torch.float64):
        raise SettingsError(f"losslessness is checked in float32, the target is in {target.dtype}")
    if any(one.temperature != 0 for one in decoded):
        raise SettingsError("greedy losslessness is checked on text decoded at temperature 0")
    noise = batch_noise(target, prompts, decoded)
    epsilon = min(4 * noise, LARGEST_EPSILON)
    progress = progress or Progress()
    largest, differences = 0.0, []
    for prompt, name, one in zip(prompts, ids, decoded, strict=True):
        gap, found = _score(target, prompt, name, one.token_ids)
        largest = max(largest, gap)
        differences += found
        progress.advance()
    near = tuple(one for one in differences if one.gap <= epsilon)
    beyond = tuple(one for one in differences if one.gap > epsilon)
    drafts = sum(int(one.cycles.verified.sum()) for one in decoded)
    return GreedyLossless(
        result="fail" if beyond else "pass" if drafts else "inconclusive",
        n=len(decoded),
        tokens=sum(len(one.token_ids) for one in decoded),
        drafts=drafts,
        drafts_accepted=sum(int(one.cycles.accepted.sum()) for one in decoded),
        dtype=str(target.dtype).removeprefix("torch."),
        noise=noise,
        epsilon=epsilon,
        largest_gap=largest,
        near_ties=near,
        near_tie_prompts=len({one.prompt for one in near}),
        violations=beyond,
    )


@torch.inference_mode()
def batch_noise(
    target: Target, prompts: Sequence[Sequence[int]], decoded: Sequence[Decoded], sequences: int = 8
) -> float:
    """Largest difference of a logit between passes as the loop makes them and a plain forward pass.

    The first `sequences` texts run through a slot cache together, prompt first and then a window of a block at a
    time, and each alone in one pass.
    """
    texts = [list(one.token_ids) for one in decoded[:sequences]]
    if not texts:
        return 0.0
    starts = np.array([len(prompt) for prompt in prompts[: len(texts)]], np.int64)
    width = 1 + max(one.cycles.gamma for one in decoded)
    longest = -(-max(map(len, texts)) // width) * width  # whole windows
    cache = SlotCache(target.record.num_layers, len(texts), int(starts.max()) + longest)

    def run(rows: list[list[int]], length: int, counts: Counts) -> Tensor:
        ids = torch.zeros(len(rows), length, dtype=torch.int64, device=target.device)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        positions, mask = cache.window(length, target.device)
        last_hidden = target.last_hidden(ids, attention_mask=mask, position_ids=positions, cache=cache)
        cache.advance(counts)
        return last_hidden

    batched = run([list(prompt) for prompt in prompts[: len(texts)]], int(starts.max()), starts)
    everyone = torch.arange(len(texts), device=batched.device)
    parts = [batched[everyone, torch.from_numpy(starts - 1).to(batched.device)][:, None]]
    for start in range(0, longest, width):
        parts.append(run([text[start : start + width] for text in texts], width, np.full(len(texts), width)))
    together = torch.cat(parts, 1)  # [rows, 1 + longest, d]: the views before each generated token
    noise = 0.0
    for row, text in enumerate(texts):
        alone = _views(target, prompts[row], text)
        difference = target.logits(together[row, : len(text)]) - alone
        noise = max(noise, float(difference.abs().max()))
    return noise


def check_sampled(progress: Progress | None = None) -> SampledLossless:
    """Enumerate the loop on tiny random targets, one per case of `CASES`.

    On the CPU wherever the target runs: what is shown is the loop's law, to more digits than norms on a GPU keep.

    Args:
        progress: advanced by one per case; the caller starts the task.
    """
    progress = progress or Progress()
    cases = []
    for family, policy, tokens, vocab, draft_ids in CASES:
        cases.append(enumerate_case(family, policy, vocab=vocab, tokens=tokens, draft_token_ids=draft_ids))
        progress.advance()
    largest = max(case.largest_difference for case in cases)
    seen = all(case.drafts for case in cases)
    return SampledLossless(
        result="fail" if largest > ENUMERATION_TOLERANCE else "pass" if seen else "inconclusive",
        temperature=1.0,
        tolerance=ENUMERATION_TOLERANCE,
        largest_difference=largest,
        cases=tuple(cases),
    )


def enumerate_case(
    family: str,
    policy: str,
    *,
    vocab: int = 3,
    gamma: int = 2,
    tokens: int = 3,
    draft_token_ids: tuple[int, ...] | None = None,
    temperature: float = 1.0,
    markov: MarkovType = "vanilla",
    seed: int = 0,
) -> EnumeratedCase:
    """The largest difference between the law of the real loop's first tokens and the target's, one setting."""
    target = tiny_target(vocab, family=family, eos_token_ids=(vocab - 1,), dtype=torch.float64, seed=seed)
    drafter = tiny_drafter(target, gamma, draft_token_ids=draft_token_ids, markov=markov, seed=seed + 1)
    proposer = torch_proposer(drafter, torch.float64)
    # Steep enough for the scheduler to stop at every length, with the confidences of a random drafter.
    curve = CostCurve(
        sample_batch_tokens=(1, 2, 3), sample_steps_per_second=(1.0, 0.65, 0.55), max_batch_tokens=max(gamma + 1, 3)
    )
    scheduler = PrefixScheduler(curve, gamma)
    chosen = _RowByRow(lambda: parse_policy(policy, scheduler=scheduler))
    prompt = [0, 1, 0, 0, 1]
    drafts = 0

    def run(draws: EnumeratingDraws, requests: int) -> list[list[int]]:
        nonlocal drafts
        done = decode(
            target,
            proposer,
            [prompt] * requests,
            max_new_tokens=tokens,
            policy=chosen,
            temperature=temperature,
            draws=draws,
            precision=torch.float64,
            batch_size=requests,
        )
        drafts += sum(int(one.cycles.verified.sum()) for one in done)
        return [one.token_ids for one in done]

    law, paths = enumerate_law(run)
    return EnumeratedCase(
        policy=policy,
        family=family,
        vocab=vocab,
        draft_vocab=vocab if draft_token_ids is None else len(draft_token_ids),
        gamma=gamma,
        tokens=tokens,
        paths=paths,
        drafts=drafts,
        largest_difference=largest_difference(law, target_law(target, prompt, tokens, temperature)),
    )


class _RowByRow:
    """A policy that looks at one request at a time, as if each row of the batch ran alone, with its own memory."""

    def __init__(self, make: Callable[[], Policy]) -> None:
        self._make = make
        self._policies: dict[int, Policy] = {}
        self.name, self.drafts = make().name, make().drafts

    def begin(self) -> None:
        """See `Remembering`."""
        self._policies.clear()

    def step(self, confidence_logits: Logits, requests: Rows) -> Counts:
        """The policy's lengths of every row on its own, [B]."""
        lengths = [np.zeros(0, np.int64)]
        for row, request in zip(confidence_logits, requests.tolist(), strict=True):
            if request not in self._policies:
                self._policies[request] = self._make()
            lengths.append(self._policies[request].lengths(row[None]))
        return np.concatenate(lengths)

    def lengths(self, confidence_logits: Logits) -> Counts:
        """As `step`, the rows being the same requests at every step."""
        return self.step(confidence_logits, np.arange(len(confidence_logits)))


@torch.inference_mode()
def _views(target: Target, prompt: Sequence[int], text: Sequence[int]) -> Tensor:
    """The target's logits before each token of `text`, from one plain forward pass; [tokens, V]."""
    ids = torch.tensor([[*prompt, *text[:-1]]], device=target.device)
    return target.logits(target.last_hidden(ids)[0, len(prompt) - 1 :])


def _score(target: Target, prompt: Sequence[int], name: str, text: Sequence[int]) -> tuple[float, list[Difference]]:
    """The largest gap in one text, and the tokens that are not the arg max."""
    views = _views(target, prompt, text)
    best = views.max(-1)
    gaps = best.values - views.gather(1, torch.tensor(text, device=views.device)[:, None]).squeeze(1)
    arg_max, gap_list = best.indices.tolist(), gaps.tolist()
    found = [
        Difference(prompt=name, position=index, token=token, best=arg_max[index], gap=gap_list[index])
        for index, token in enumerate(text)
        if token != arg_max[index]
    ]
    return max(gap_list), found
