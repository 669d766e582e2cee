"""Paired comparison: the difference is right, its interval covers, its verdicts err as rarely as they say."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from dspark.errors import DataError
from dspark.evaluation.paired import (
    Judgement,
    PairedPrompts,
    PairedReport,
    Rival,
    judge_gain,
    judge_loss,
    relative_difference,
    tau_of,
)
from dspark.io.jsonfile import read_model, write_model
from dspark.measured import Measured


def counts(tokens, cycles):
    return np.array(tokens, float), np.array(cycles, float)


def difference(value: float, low: float, high: float, n: int = 25) -> Measured:
    return Measured(value=value, n=n, ci95=(low, high))


def test_taus_are_pooled_before_they_are_compared():
    """Tokens 30 in 10 cycles against 30 in 12: 3 / 2.5 - 1 = 0.2. The mean of the prompts' own ratios would be 0.25."""
    measured = relative_difference(counts([10, 20], [5, 5]), counts([10, 20], [5, 7]))
    assert measured is not None
    assert measured.value == pytest.approx(0.2)
    assert measured.n == 2
    # Resampling two prompts gives (1,1), (1,2), (2,2): differences 0, 0.2 and 0.4.
    assert measured.ci95 == pytest.approx((0.0, 0.4))
    tau = tau_of(counts([10, 20], [5, 5]))
    assert tau is not None and tau.value == 3


def test_a_candidate_against_itself_differs_by_nothing_at_all():
    """Paired: the prompts' own spread cancels. Unpaired resampling would give an interval of about a fifth each way."""
    generator = np.random.default_rng(0)
    cycles = generator.integers(5, 40, 30)
    same = counts(cycles * generator.integers(1, 5, 30), cycles)
    measured = relative_difference(same, same)
    assert measured is not None and (measured.value, measured.ci95) == (0, (0, 0))


def test_a_side_without_a_cycle_has_no_difference():
    assert relative_difference(counts([0, 0], [0, 0]), counts([2, 2], [1, 1])) is None
    assert relative_difference(counts([], []), counts([], [])) is None


def drawn(generator: np.random.Generator, prompts: int, mean: float, rival_mean: float):
    """60 tokens of every prompt, in Poisson cycles whose mean follows the prompt's difficulty.

    The pooled taus are 60 / mean and 60 / rival_mean times the same, so the true difference is rival_mean / mean - 1.
    """
    difficulty = generator.gamma(8, 1 / 8, prompts)
    tokens = np.full(prompts, 60.0)
    mine, theirs = (generator.poisson(level * difficulty) + 1.0 for level in (mean - 1, rival_mean - 1))
    return (tokens, mine), (tokens, theirs)


def test_the_interval_covers_and_the_verdicts_err_as_seldom_as_they_say():
    """300 runs of 40 prompts in which the candidate is worse by exactly the allowed loss.

    95 % coverage has a standard error of 1.3 % here; a percentile bootstrap of 40 prompts covers about 93 %. At the
    limit `non-inferior` and `worse` are the two one-sided errors of 2.5 %, and `better` does not happen.
    """
    generator = np.random.default_rng(1)
    truth = 20 / 22 - 1
    covered, verdicts, gains = 0, [], []
    for _ in range(300):
        mine, theirs = drawn(generator, 40, 22, 20)
        measured = relative_difference(mine, theirs)
        assert measured is not None
        covered += measured.ci95[0] <= truth <= measured.ci95[1]
        verdicts.append(judge_loss(measured, -truth).verdict)
        gains.append(judge_gain(measured, 0.0).verdict)
    assert 0.90 <= covered / 300 <= 0.98
    assert verdicts.count("non-inferior") / 300 <= 0.065  # 2.5 % and three standard errors, and some for the bootstrap
    assert verdicts.count("worse") / 300 <= 0.065
    assert gains.count("better") == 0


def test_equal_drafters_are_hardly_ever_called_better():
    generator = np.random.default_rng(2)
    verdicts = []
    for _ in range(200):
        measured = relative_difference(*drawn(generator, 40, 20, 20))
        assert measured is not None
        verdicts.append(judge_gain(measured, 0.0).verdict)
    assert verdicts.count("better") / 200 <= 0.07
    assert verdicts.count("undecided") / 200 >= 0.85


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (difference(0.0, -0.029, 0.03), "non-inferior"),
        (difference(0.0, -0.03, 0.03), "undecided"),  # the bound itself is not above the limit
        (difference(-0.02, -0.025, -0.015), "non-inferior"),  # surely worse, and by no more than allowed
        (difference(-0.05, -0.07, -0.031), "worse"),
        (difference(-0.05, -0.07, -0.03), "undecided"),
    ],
)
def test_a_loss_is_judged_by_the_whole_interval(measured: Measured, verdict: str):
    assert judge_loss(measured, 0.03).verdict == verdict


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (difference(0.02, 0.001, 0.04), "better"),
        (difference(0.019, 0.001, 0.04), "undecided"),  # surely better, and not surely by enough
        (difference(0.03, 0.0, 0.06), "undecided"),
        (difference(0.01, 0.005, 0.015), "fail"),  # surely a gain, surely too small
        (difference(-0.01, -0.03, 0.01), "fail"),
        (difference(-0.03, -0.05, -0.01), "worse"),
    ],
)
def test_a_gain_must_be_sure_and_large_enough(measured: Measured, verdict: str):
    assert judge_gain(measured, 0.02).verdict == verdict


def test_the_number_of_prompts_that_would_decide():
    """The width falls as 1 / sqrt(n): 1/16 below must become less than 1/32, so more than four times as many."""
    limit = 1 / 32
    assert judge_loss(difference(0.0, -1 / 16, 1 / 16), limit) == Judgement("undecided", 101)
    assert judge_loss(difference(-1 / 16, -1 / 8, 1 / 32), limit) == Judgement("undecided", 226)  # to be called worse
    assert judge_loss(difference(-1 / 32, -1 / 8, 1 / 32), limit) == Judgement("undecided", None)
    assert judge_gain(difference(1 / 32, 0.0, 1 / 8), limit) == Judgement("undecided", 26)
    assert judge_gain(difference(1 / 64, -1 / 64, 3 / 64), limit) == Judgement("undecided", 101)  # to be refused
    assert judge_gain(difference(0.0, -1 / 64, 1 / 32), 0.0) == Judgement("undecided", None)


def test_so_many_prompts_of_the_same_kind_do_decide():
    """The same prompts over and over have the same difference and an interval narrower by the root of how often."""
    mine, theirs = drawn(np.random.default_rng(5), 12, 20.4, 20)

    def repeated(times: int) -> Judgement:
        tiled = [tuple(np.tile(column, times) for column in side) for side in (mine, theirs)]
        measured = relative_difference(*tiled)
        assert measured is not None
        return judge_loss(measured, 0.05)

    first = repeated(1)
    assert first.verdict == "undecided" and first.prompts_needed is not None
    times = first.prompts_needed / 12
    assert times > 4
    assert repeated(round(0.6 * times)).verdict == "undecided"
    assert repeated(round(1.7 * times)).verdict in {"non-inferior", "worse"}


def prompts(**changes) -> PairedPrompts:
    columns = {
        "ids": ("a", "b"), "domains": ("math", "chat"), "committed": (8, 6), "cycles": (4, 3),
        "rival_committed": (8, 6), "rival_cycles": (2, 6),
    }  # fmt: skip
    return PairedPrompts.model_validate(columns | changes)


def rival(gamma: int = 3, **changes) -> Rival:
    return Rival(package_digest="a" * 64, model_digest="b" * 64, build="demo", gamma=gamma, training_domains=("math",),
                 temperatures={"0": prompts(**changes)})  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cycles": (4,)}, "different length"),
        ({"ids": ("a", "a")}, "two rows"),
        ({"committed": (3, 6)}, "at least one token"),
        ({"rival_committed": (-1, 6)}, "greater than or equal to 0"),
    ],
)
def test_impossible_counts_are_refused(changes: dict, said: str):
    with pytest.raises(ValidationError, match=said):
        prompts(**changes)


def test_no_cycle_commits_more_than_its_block_and_the_bonus(tmp_path):
    report = PairedReport(gamma=1, rivals=(rival(),))
    write_model(tmp_path / "paired.json", report)
    assert read_model(tmp_path / "paired.json", PairedReport) == report
    assert report.rival("a" * 64) is not None and report.rival("c" * 64) is None
    with pytest.raises(ValidationError, match="gamma 2 commits at most 3 tokens"):
        PairedReport(gamma=1, rivals=(rival(gamma=2),))  # the rival's 8 tokens in 2 cycles
    with pytest.raises(ValidationError, match="gamma 1 commits at most 2 tokens"):
        PairedReport(gamma=1, rivals=(rival(committed=(9, 6)),))
    with pytest.raises(ValidationError, match="twice"):
        PairedReport(gamma=1, rivals=(rival(), rival()))


def test_only_the_same_prompts_at_one_temperature_are_paired():
    from dspark.config.models import EvaluationSettings
    from dspark.corpus.prompts import PreparedPrompt
    from dspark.decoding.drafting import TorchProposer
    from dspark.evaluation.decoding import decode_prompts
    from dspark.evaluation.tiny import tiny_drafter, tiny_target

    target = tiny_target(40, spread=0.3)
    asked = [
        PreparedPrompt(id=f"p{i}", domain="math", messages=[{"role": "user", "content": "x"}], token_ids=[3 + i, 4])
        for i in range(3)
    ]
    settings = EvaluationSettings(max_new_tokens=8)
    proposer = TorchProposer(tiny_drafter(target, 3))
    greedy, sampled = (decode_prompts(target, proposer, asked, settings, temperature=t) for t in (0.0, 1.0))
    paired = PairedPrompts.of(greedy, greedy)
    assert paired.committed == paired.rival_committed == tuple(
        int(one.cycles.committed.sum()) for one in greedy.decoded)  # fmt: skip
    assert paired.cycles == tuple(len(one.cycles) for one in greedy.decoded)
    with pytest.raises(DataError, match="different prompts"):
        PairedPrompts.of(greedy, greedy.only([0, 1]))
    with pytest.raises(DataError, match="one temperature"):
        PairedPrompts.of(greedy, sampled)
