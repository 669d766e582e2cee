from __future__ import annotations

from dspark.config.models import CalibrationSettings
from dspark.corpus.prompts import PreparedPrompt
from dspark.decoding.drafting import TorchProposer
from dspark.evaluation.calibrate import calibrate_drafter
from dspark.evaluation.tiny import tiny_drafter, tiny_target


def test_each_temperature_of_the_target_gets_its_own_result_and_label():
    target = tiny_target(40, spread=0.3)
    prompts = [
        PreparedPrompt(
            id=f"m{n}", domain="math", messages=[{"role": "user", "content": "x"}], token_ids=[3 + n, 5, 8, n + 2]
        )
        for n in range(6)
    ]
    settings = CalibrationSettings(prompts_per_domain=4, max_new_tokens=12, batch_size=4, min_samples=5)
    results = calibrate_drafter(target, TorchProposer(tiny_drafter(target, 3)), prompts, settings)
    keys = [result.calibration.key for result in results]
    assert [(key.temperature, key.label) for key in keys] == [(0.0, "greedy_match"), (1.0, "sampled")]
    for result in results:
        assert len(result.temperatures) == 3
        assert result.calibration.conversations_fit + result.calibration.held_out.conversations == 4
