"""What to run at which load: chosen on one half of the rounds, judged on the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dspark.evaluation.entry import AgainstChampion, ChampionRatio, Recommendation
from dspark.evaluation.rounds import ENOUGH, NONE, Comparison
from dspark.io.progress import Progress
from dspark.measured import Measured


def recommend(comparisons: Sequence[Comparison], gamma: int) -> tuple[Recommendation, ...]:
    """The policy of each range of concurrency: the faster one on one half of the rounds, if it holds on the other.

    A policy is recommended where the lower bound of its ratio on the second half is above 1; elsewhere speculation is
    switched off, also where there are too few rounds to tell (`decided`).
    """
    found: list[Recommendation] = []
    for place, comparison in enumerate(comparisons):
        fit, judge = comparison.halves()
        speeds = {
            arm.name: comparison.ratio(arm.name, fit or None).value for arm in comparison.arms if arm.name != NONE
        }
        best = max(speeds, key=lambda name: speeds[name])
        ratio = comparison.judged(best)
        pays = ratio is not None and ratio.ci95[0] > 1
        chosen = best if pays else NONE
        last = place + 1 == len(comparisons)
        found.append(
            Recommendation(
                from_concurrency=comparison.concurrency,
                to_concurrency=comparison.concurrency if last else comparisons[place + 1].concurrency - 1,
                policy=next(arm.policy.name for arm in comparison.arms if arm.name == chosen),
                gamma=gamma,
                decided=ratio is not None,
                reason=_reason(best, ratio, pays=pays) if ratio is not None else _too_few(comparison, best),
                behind_best=_behind_best(comparison, chosen, judge) if judge else None,
            )
        )
    return tuple(found)


def note_halves(rounds: int, progress: Progress) -> None:
    """Say before they are timed which rounds will have no part in a recommendation, or that there will be none."""
    if rounds < ENOUGH:
        progress.note(f"{rounds} rounds are too few to recommend a policy: {_more()}")
    elif rounds % 4:
        progress.note(f"of {rounds} rounds {rounds // 4 * 4} choose and judge what is recommended: they go by fours")


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


def _reason(best: str, ratio: Measured, *, pays: bool) -> str:
    return f"{best} is {ratio} times as fast as none{'' if pays else ', which is not surely above 1'}"


def _too_few(comparison: Comparison, best: str) -> str:
    rounds = len(comparison.rounds[NONE])
    told = f"{best} was {comparison.ratio(best).value:.3f} times as fast as none in {rounds} rounds"
    return f"{told}, too few to tell whether it pays: {_more()}"


def _more() -> str:
    return f"--set evaluation.throughput_rounds={ENOUGH} or more"
