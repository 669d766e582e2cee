"""How often do drafters mix two answers ("of problem", "no course")? dspark against the same drafter without its head.

    python benchmarks/two_modes.py [--seeds 3]

Losses are those of the recipes in `pipeline/recipes/`; the drafters are of one layer, for a target of 32 tokens whose
answers are "of course" and "no problem", one as likely as the other (`dspark.evaluation.two_modes`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dspark.config.declared import read_declared
from dspark.config.models import DrafterSettings, MarkovSettings, RecipeSpec, TrainingSettings
from dspark.evaluation.two_modes import Crossings, crossings, two_mode_target

RECIPES = Path(__file__).resolve().parents[1] / "pipeline" / "recipes"
COMPARED = ("dspark", "dflash-tv")
GAMMA, RANK = 4, 8
STEPS, LEARNING_RATE = 240, 1e-2  # after 120 at 3e-3 the drafter without a head is not trained out


def measure(recipe: str, seed: int) -> Crossings:
    """One recipe's drafter, trained on answers of its own draw."""
    spec = read_declared(RECIPES, recipe, RecipeSpec, word="recipe")
    head = spec.drafter.markov.type
    drafter = DrafterSettings(
        gamma=GAMMA, layers=1, markov=MarkovSettings(type=head, rank=RANK), confidence=spec.drafter.confidence
    )
    training = TrainingSettings(
        precision="float32",
        steps=STEPS,
        sequences_per_step=16,
        anchors_per_sequence=16,
        max_length=64,
        learning_rate=LEARNING_RATE,
        loss=spec.training.loss,
        dev_every_steps=STEPS // 4,
        checkpoint_every_steps=STEPS,
    )
    return crossings(two_mode_target(), drafter, training, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{'recipe':10}  seed  crossed of drafted phrases          phrases  tau     acceptance by position")
    for seed in range(arguments.seeds):
        for recipe in COMPARED:
            found = measure(recipe, seed)
            low, high = found.rate.ci95
            rates = " ".join(f"{rate.value:.2f}" for rate in found.acceptance.conditional)
            print(
                f"{recipe:10}  {seed:4}  {found.rate.value:6.1%} [{low:6.1%}, {high:6.1%}]          {found.phrases:7}  "
                f"{found.acceptance.tau.value:.3f}   {rates}"
            )


if __name__ == "__main__":
    main()
