"""Why a server drifted: another engine, or other traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from dspark.evaluation.drift import Drift
from dspark.evaluation.results import Model
from dspark.measured import Measured


class Cause(Model):
    """What the difference may come from."""

    kind: Literal["none", "engine change", "domain shift", "unknown"]
    text: str
    fields: tuple[str, ...] = ()  # of the engine, in which it is not what was certified


def cause_of(
    drift: Drift, fields: Sequence[str] | None, elsewhere: Mapping[str, Measured], *, silent: str = ""
) -> Cause:
    """Tell a change of the engine from a change of the traffic, as far as can be told.

    Args:
        fields: in which the engine is not what was certified; None: it tells nothing of itself.
        elsewhere: tau of the evaluation at other temperatures than the certified one, by temperature.
        silent: why the engine tells nothing.
    """
    told = tuple(fields or ())
    if drift.verdict == "not comparable":
        return Cause(kind="none", text=drift.quantities[0].reason or "nothing was counted", fields=told)
    if drift.verdict != "drifted":
        text = f"the engine is not the certified one: {'; '.join(told)}" if told else "nothing to explain"
        return Cause(kind="none", text=text, fields=told)
    traffic = _traffic(drift, elsewhere)
    if told:
        text = f"engine change suspected, since it is not the certified one: {'; '.join(told)}. Otherwise {traffic}"
        return Cause(kind="engine change", text=text, fields=told)
    if fields is None:
        return Cause(kind="unknown", text=f"{silent}; if the engine is the certified one, {traffic}")
    return Cause(kind="domain shift", text=f"the engine tells what was certified of it, so {traffic}")


def _traffic(drift: Drift, elsewhere: Mapping[str, Measured]) -> str:
    """What of the traffic would look so."""
    tau, mixture = drift.quantities[0], drift.mixture
    if mixture is None or tau.live is None or tau.certified is None:
        return "the traffic is other than what was certified"
    low, high = mixture.range
    if mixture.inside == "yes":
        shares = ", ".join(f"{name} {share:.0%}" for name, share in mixture.shares.items())
        text = f"the traffic has moved between the certified domains: nearest is a mixture of {shares} of the steps"
    else:
        text = (
            f"the traffic is of a domain that was not certified: tau lies {mixture.inside} everything from {low:.3f} "
            f"to {high:.3f}, which no mixture of the certified domains leaves"
        )
    for temperature, other in elsewhere.items():
        if abs(other.value - tau.live.value) < abs(tau.certified.value - tau.live.value):
            text += f"; sampling at temperature {temperature} would look so as well (evaluation: tau {other.value:.3f})"
    return text
