"""What to run at which load: chosen on one half of the rounds, judged on the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dspark.evaluation.entry import AgainstChampion, ChampionRatio, Recommendation
from dspark.evaluation.rounds import NONE, Comparison
from dspark.measured import Measured


def recommend(comparisons: Sequence[Comparison], gamma: int) -> tuple[Recommendation, ...]:
    """The policy of each range of concurrency: the faster one on one half of the rounds, if it holds on the other.

    Halves consist of pairs of rounds, so that each holds both orders of the arms. A policy is recommended where the
    lower bound of its ratio on the second half is above 1; elsewhere speculation is switched off.
    """
    found: list[Recommendation] = []
    for place, comparison in enumerate(comparisons):
        numbers = range(len(comparison.rounds[NONE]))
        fit, judge = [n for n in numbers if n // 2 % 2 == 0], [n for n in numbers if n // 2 % 2 == 1]
        speeds = {arm.name: comparison.ratio(arm.name, fit).value for arm in comparison.arms if arm.name != NONE}
        best = max(speeds, key=lambda name: speeds[name])
        ratio = comparison.ratio(best, judge or fit)
        pays = ratio.ci95[0] > 1 and bool(judge)
        chosen = best if pays else NONE
        last = place + 1 == len(comparisons)
        found.append(
            Recommendation(
                from_concurrency=comparison.concurrency,
                to_concurrency=comparison.concurrency if last else comparisons[place + 1].concurrency - 1,
                policy=next(arm.policy.name for arm in comparison.arms if arm.name == chosen),
                gamma=gamma,
                reason=_reason(best, ratio, pays, len(judge)),
                behind_best=_behind_best(comparison, chosen, judge) if judge else None,
            )
        )
    return tuple(found)


def against_champion(
    package_digest: str,
    comparisons: Sequence[Comparison],
    recommended: Sequence[Recommendation],
    arms: Mapping[str, str],
    gamma: int,
) -> AgainstChampion:
    """Candidate against champion at every load, each under the policy that is recommended for it there.

    Args:
        comparisons: with the arms of both, by ascending concurrency.
        recommended: for the candidate.
        arms: of the champion, by policy, plain decoding among them.
        gamma: of the champion.
    """
    theirs = [comparison.only(list(arms.values())) for comparison in comparisons]
    loads = [arm.load for each in theirs for name, arm in each.report().arms.items() if name != NONE]
    ratios = []
    for comparison, mine, other in zip(comparisons, recommended, recommend(theirs, gamma), strict=True):
        ratios.append(
            ChampionRatio(
                concurrency=comparison.concurrency,
                policy=mine.policy,
                champion_policy=other.policy,
                ratio=comparison.ratio(mine.policy, to=arms[other.policy]),
            )
        )
    return AgainstChampion(package_digest=package_digest, load=tuple(loads), ratios=tuple(ratios))


def _behind_best(comparison: Comparison, chosen: str, judge: Sequence[int]) -> float:
    """How much slower the chosen arm is than the best one on rounds that had no part in the choice."""
    fastest = max(comparison.ratio(arm.name, judge, to=chosen).value for arm in comparison.arms)
    return 1 - 1 / fastest


def _reason(best: str, ratio: Measured, pays: bool, judged: int) -> str:
    if not judged:
        return f"{best} was not judged on rounds of its own: measure at least four"
    return f"{best} is {ratio} times as fast as none{'' if pays else ', which is not surely above 1'}"
