"""The overfit gate on a tiny random target: reached, for want of steps, and with features that don't fit together."""

import pytest

from dspark.cli.overfit import refusal
from dspark.config.models import DrafterSettings, MarkovSettings, TrainingSettings
from dspark.decoding import proposers
from dspark.decoding.drafting import TorchProposer
from dspark.errors import DataError
from dspark.evaluation.overfit import OverfitReport, overfit
from dspark.evaluation.tiny import tiny_target
from dspark.io.jsonfile import model_json

PROMPTS = [[5, 6, 7], [9, 10, 11, 12], [20, 21]]
DRAFTER = DrafterSettings(gamma=3, layers=1, markov=MarkovSettings(rank=8))
NO_HEAD = MarkovSettings(type="none")
OTHERS = {
    "dspark-gated": DrafterSettings(gamma=3, layers=1, markov=MarkovSettings(type="gated", rank=8)),
    "dspark-rnn": DrafterSettings(gamma=3, layers=1, markov=MarkovSettings(type="rnn", rank=8)),
    "dflash": DrafterSettings(gamma=3, layers=1, markov=NO_HEAD, confidence=False),
    "mtp1": DrafterSettings(gamma=1, layers=1, markov=NO_HEAD, confidence=False),
    "eagle3": DrafterSettings(kind="eagle3", gamma=3, layers=1, markov=NO_HEAD, confidence=False),
}
TRAINING = TrainingSettings(precision="float32")


@pytest.fixture(scope="module")
def target():
    return tiny_target(40, spread=0.5, eos_token_ids=(39,))


def run(target, prompts=PROMPTS, drafter=DRAFTER, **changes):
    settings = {"steps": 120, "learning_rate": 0.02, "max_new_tokens": 24, "share": 0.9} | changes
    return overfit(target, prompts, drafter, TRAINING, **settings)


def test_a_handful_of_answers_is_learned_until_whole_blocks_are_accepted(target):
    report = run(target)
    assert report.reached and report.learned
    assert report.steps < 120  # it stopped when there was nothing left to learn
    assert sum(report.accepted) == report.cycles >= 12  # four tokens a cycle, if all goes well
    assert report.whole_blocks >= 0.9 * report.cycles
    assert report.tokens_per_cycle == pytest.approx(
        sum((count + 1) * number for count, number in enumerate(report.accepted)) / report.cycles
    )
    assert report.equal_answers == report.sequences == 3
    assert OverfitReport.model_validate(model_json(report)) == report


@pytest.mark.parametrize("recipe", OTHERS)
def test_a_drafter_of_any_recipe_gets_there(target, recipe):
    report = run(target, drafter=OTHERS[recipe])
    assert report.reached and report.learned
    assert report.equal_answers == 3


def test_too_few_steps_are_told_from_features_that_do_not_fit(target):
    report = run(target, steps=1)
    assert not report.reached and not report.learned
    what, hint = refusal(report)
    assert "after 1 steps the drafter has only" in what
    assert "more --steps" in hint


def test_taps_in_another_order_when_decoding_are_found(target, monkeypatch):
    """Training reaches all that it can; that no block survives can only come from what decoding feeds the drafter."""

    class Swapped(TorchProposer):
        def extend(self, features, counts, token_ids):
            super().extend(features.roll(features.shape[-1] // 2, -1), counts, token_ids)

    monkeypatch.setattr(proposers, "TorchProposer", Swapped)
    report = run(target)
    assert report.learned and not report.reached
    assert report.equal_answers == 3  # a bad drafter changes no token
    assert "although the drafter knows the texts by heart" in refusal(report)[0]


def test_answers_too_short_for_a_block_are_refused(target):
    with pytest.raises(DataError, match="answers 1 prompts with 4 tokens at most, a block takes 5"):
        run(target, prompts=PROMPTS[:1], max_new_tokens=4)
