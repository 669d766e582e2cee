"""Algorithm 1 of the paper, written out literally for the tests, and wrong schedulers that the tests must catch."""

from __future__ import annotations


def sps(probes, rates, tokens):
    """The last probe at or below `tokens`; the first one below all probes."""
    value = rates[0]
    for probe, rate in zip(probes, rates, strict=True):
        if probe <= tokens:
            value = rate
    return value


def candidates(survival, caps=None):
    """(request, position) pairs, falling survival; equal ones by position, then request."""
    pairs = [(-a, j, r) for r, row in enumerate(survival) for j, a in enumerate(row) if caps is None or j < caps[r]]
    return [(r, j, -negative) for negative, j, r in sorted(pairs)]


def early_stop(survival, probes, rates, *, caps=None, limit=None, least=0, gain=0.0):
    """DSpark, Algorithm 1; `limit`, `least` and `gain` are our additions, at their defaults it is the paper's."""
    requests = len(survival)
    lengths = [0] * requests
    batch, tau = requests, float(requests)
    best = requests * sps(probes, rates, requests)
    for admitted, (r, _, a) in enumerate(candidates(survival, caps)):
        if limit is not None and admitted == limit:
            break
        batch += 1
        tau += a
        theta = tau * sps(probes, rates, batch)
        if admitted >= least and not theta > best * (1 + gain / requests):
            break
        best = theta
        lengths[r] += 1
    return lengths


def retrospective(survival, probes, rates):
    """Mutant: the best point of the whole curve. Not lossless (appendix A)."""
    requests = len(survival)
    tau, best, best_count = float(requests), requests * sps(probes, rates, requests), 0
    order = candidates(survival)
    for count, (_, _, a) in enumerate(order, start=1):
        tau += a
        theta = tau * sps(probes, rates, requests + count)
        if theta > best:
            best, best_count = theta, count
    return _lengths(requests, order[:best_count])


def not_strict(survival, probes, rates):
    """Mutant: also admits what does not raise the prediction (tokens that cannot survive, on a plateau)."""
    return early_stop(survival, probes, rates, gain=-1e-15)


def cost_before_admission(survival, probes, rates):
    """Mutant: charges a token with the step that it would have had without it."""
    return early_stop(survival, [probe + 1 for probe in probes], rates)


def one_request_after_another(survival, probes, rates):
    """Mutant: fills request by request instead of by falling survival."""
    lengths, batch, tau = [], len(survival), float(len(survival))
    best = tau * sps(probes, rates, batch)
    for row in survival:
        length = 0
        for a in row:
            theta = (tau + a) * sps(probes, rates, batch + 1)
            if not theta > best:
                break
            best, tau, batch, length = theta, tau + a, batch + 1, length + 1
        lengths.append(length)
    return lengths


def block_gain(survival, probes, rates, gain=0.7):
    """Mutant: withdraws an early-stop plan whose *total* gain is too small, which looks past the first token."""
    lengths = early_stop(survival, probes, rates)
    requests, budget = len(survival), sum(lengths)
    tau = requests + sum(sum(row[:length]) for row, length in zip(survival, lengths, strict=True))
    theta = tau * sps(probes, rates, requests + budget)
    return lengths if theta > (1 + gain) * requests * sps(probes, rates, requests) else [0] * requests


def _lengths(requests, kept):
    lengths = [0] * requests
    for r, _, _ in kept:
        lengths[r] += 1
    return lengths
