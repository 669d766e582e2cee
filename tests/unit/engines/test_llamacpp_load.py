"""How a server is started for each policy; the servers themselves run in tests/integration."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.decoding.policies import Fixed, NoDrafts, Policy, Threshold
from dspark.engines.llamacpp import LlamaCppSettings
from dspark.engines.llamacpp_load import settings_for
from dspark.errors import SettingsError

SETTINGS = LlamaCppSettings(Path("target.gguf"), Path("drafter.gguf"), context=256, slots=2)


@pytest.mark.parametrize(
    ("policy", "n_max", "p_min"),
    [(Fixed(), 4, 0.0), (Fixed(2), 2, 0.0), (Fixed(9), 4, 0.0), (Threshold(0.5), 4, 0.5)],
)
def test_a_policy_decides_how_many_drafts_are_verified(policy: Policy, n_max: int, p_min: float):
    found = settings_for(SETTINGS, policy, 4)
    assert (found.drafter, found.n_max, found.p_min) == (SETTINGS.drafter, n_max, p_min)
    assert (found.context, found.slots) == (256, 2)


def test_plain_decoding_has_no_drafter():
    assert settings_for(SETTINGS, NoDrafts(), 4).drafter is None


def test_a_policy_that_the_engine_does_not_have_is_refused():
    class Scheduled:
        name, drafts = "scheduled", True

    with pytest.raises(SettingsError, match=r"llama\.cpp has no policy scheduled"):
        settings_for(SETTINGS, Scheduled(), 4)  # type: ignore[arg-type]
