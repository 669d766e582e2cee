"""What a scrape of an engine's `/metrics` says of speculation, and what happened between two of them.

The names are those of vLLM 0.32.0, SGLang 0.5.23 and llama.cpp's server of xllamacpp 2026.10. A scrape holds totals
since the server started, of everybody that it served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dspark.engines import llamacpp_log, vllm_client
from dspark.engines.counters import without_zeros_at_the_end
from dspark.engines.http import HttpClient
from dspark.engines.prometheus import Sample, parse_samples, speculation_counters
from dspark.errors import DataError

_WHERE = "give the address of a llama.cpp, SGLang or vLLM server, or a file with what its /metrics answered"


@dataclass(frozen=True)
class Scrape:
    """Totals of a server, or what was added to them.

    Attributes:
        engine: a key of `connect.CLIENTS`.
        steps: verified blocks.
        accepted: draft tokens that were accepted, as far as they are known.
        drafted: draft tokens that were verified; None: the engine does not say.
        per_position: accepted at each place of a block; None: the engine does not say.
        tokens: that were generated.
        ended: requests that have ended; None: the engine does not count them.
        longest: tokens of the longest sequence so far, prompt included; 0: the engine does not say.
        cut_replies: requests of whose last block the drafts behind the reply's end are missing in `accepted`.
        window: mean number of positions that a scheduler let a step verify, bonus included; None: it does not say.
        starts: when counting began, by series, where the exporter says so: what tells a restart.
    """

    engine: str
    steps: int
    accepted: int
    drafted: int | None
    per_position: tuple[int, ...] | None
    tokens: int
    ended: int | None
    longest: int = 0
    cut_replies: int = 0
    window: float | None = None
    starts: Mapping[str, float] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        """Requests that have ended; where they are not counted at least so many, by two bounds.

        None is longer than the longest sequence. And each has a token or two that no step yields, the first one and an
        undrafted last one, if every other step drafts.
        """
        if self.ended is not None:
            return self.ended
        by_length = math.ceil(self.tokens / self.longest) if self.longest else 0
        return max(math.ceil(self.outside / 2), by_length) if self.steps else by_length

    @property
    def outside(self) -> int:
        """Tokens that no drafted block yielded."""
        return max(0, self.tokens - self.steps - self.accepted)


class _MetricsClient(HttpClient):
    """Any server with `/metrics`."""

    engine = "the server"
    how_to_start = (
        "SGLang needs --enable-metrics and llama.cpp --metrics; else save what /metrics answers, and give the file"
    )


def fetch_metrics(address: str, *, patience: float = 30.0) -> str:
    """What a server answers to `/metrics`.

    Args:
        address: of the server, with or without `/metrics`.
    Raises:
        SettingsError: no such address.
        ServiceError: it does not answer.
    """
    client = _MetricsClient(base_of(address), patience=patience)
    return client.get("/metrics").decode("utf-8", errors="replace")


def base_of(address: str) -> str:
    """The address of a server, `/metrics` left out."""
    return address.rstrip("/").removesuffix("/metrics")


def read_metrics(path: Path) -> str:
    """A saved scrape.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as reason:
        raise DataError(f"{path}: cannot be read: {reason.strerror}", _WHERE) from None


def parse_scrape(text: str, source: str) -> Scrape:
    """The totals of whichever engine wrote a scrape.

    Args:
        source: where it comes from, for messages.
    Raises:
        DataError: there are no metrics of an engine that is known, or of several.
    """
    samples = [sample for sample in parse_samples(text) if math.isfinite(sample.value)]
    found = [name for name in _READERS if any(sample.name.startswith(f"{name}:") for sample in samples)]
    if len(found) != 1:
        what = f"metrics of {' and '.join(found)} in one" if found else "no metrics of llama.cpp, SGLang or vLLM"
        raise DataError(f"{source}: {what}", _WHERE)
    scrape = _READERS[found[0]](samples)
    return replace(scrape, starts=_starts(samples))


def between(before: Scrape, after: Scrape) -> tuple[Scrape, bool]:
    """What a server did between two scrapes, and whether it was started again meanwhile.

    After a restart this is what it did since then, all that is known. A server that is older than that by a part only
    (several engines behind one address) adds what it did before.

    Raises:
        DataError: the scrapes are of two engines.
    """
    if before.engine != after.engine:
        raise DataError(
            f"the earlier scrape is of {before.engine}, the later one of {after.engine}",
            "take both scrapes of one server",
        )
    if _restarted(before, after):
        return after, True
    earlier = before.per_position or ()
    positions = None
    if after.per_position is not None:
        padded = (*earlier, *(0 for _ in after.per_position[len(earlier) :]))
        counts = tuple(now - then for now, then in zip(after.per_position, padded, strict=True))
        positions = without_zeros_at_the_end(counts)
    return replace(
        after,
        steps=after.steps - before.steps,
        accepted=max(0, after.accepted - before.accepted),
        drafted=None if after.drafted is None else after.drafted - (before.drafted or 0),
        per_position=positions,
        tokens=after.tokens - before.tokens,
        ended=None if after.ended is None else after.ended - (before.ended or 0),
        cut_replies=after.cut_replies - before.cut_replies,
    ), False


def _restarted(before: Scrape, after: Scrape) -> bool:
    if any(after.starts[key] != start for key, start in before.starts.items() if key in after.starts):
        return True
    then, now = _growing(before), _growing(after)
    return len(then) > len(now) or any(late < early for early, late in zip(then, now, strict=False))


def _growing(scrape: Scrape) -> tuple[int, ...]:
    """What can only grow while a server runs. SGLang's accepted drafts are worked out, and may fall."""
    accepted = 0 if scrape.engine == "sglang" else scrape.accepted
    return (scrape.steps, accepted, scrape.drafted or 0, scrape.tokens, scrape.ended or 0, *(scrape.per_position or ()))


def _vllm(samples: Sequence[Sample]) -> Scrape:
    tokens, ended = _total(samples, "vllm:generation_tokens"), _total(samples, "vllm:request_success")
    return _counted("vllm", samples, vllm_client.METRICS, tokens=tokens, ended=ended)


def _llamacpp(samples: Sequence[Sample]) -> Scrape:
    tokens, longest = _total(samples, "llamacpp:tokens_predicted"), _total(samples, "llamacpp:n_tokens_max")
    return _counted("llamacpp", samples, llamacpp_log.METRICS, tokens=tokens, longest=longest)


def _counted(
    engine: str, samples: Sequence[Sample], prefix: str, *, tokens: int, ended: int | None = None, longest: int = 0
) -> Scrape:
    """The scrape of an engine that counts steps, drafts and accepted drafts itself."""
    counters, _ = speculation_counters(samples, prefix)
    return Scrape(
        engine=engine,
        steps=counters.steps,
        accepted=counters.accepted,
        drafted=counters.drafted,
        per_position=counters.per_position,
        tokens=tokens,
        ended=ended,
        longest=longest,
    )


def _sglang(samples: Sequence[Sample]) -> Scrape:
    """SGLang counts steps, tokens and requests when a request ends; what it accepted follows, but for the last blocks.

    Of those a reply holds no more than fits below its limit, so that accepted drafts are missing there.
    """
    steps = _total(samples, "sglang:spec_verify_calls")
    tokens, requests = _total(samples, "sglang:generation_tokens"), _total(samples, "sglang:num_requests")
    windows = [sample.value for sample in samples if sample.name == "sglang:spec_cap_length" and sample.value > 0]
    return Scrape(
        engine="sglang",
        steps=steps,
        accepted=max(0, tokens - requests - steps) if steps else 0,
        drafted=None,
        per_position=None,
        tokens=tokens,
        ended=requests,
        cut_replies=requests,
        window=min(windows, default=None),
    )


_READERS: dict[str, Callable[[Sequence[Sample]], Scrape]] = {"llamacpp": _llamacpp, "sglang": _sglang, "vllm": _vllm}


def _total(samples: Sequence[Sample], name: str) -> int:
    """A counter over all its label sets; exporters write it with `_total` or, as older ones did, without."""
    return int(sum(sample.value for sample in samples if sample.name in (name, f"{name}_total")))


def _starts(samples: Sequence[Sample]) -> dict[str, float]:
    """When each series of an engine began to count, and its process to run."""
    told = [
        sample
        for sample in samples
        if sample.name == "process_start_time_seconds"
        or (":" in sample.name and sample.name.endswith("_created") and "spec" in sample.name)
    ]
    return {f"{one.name}{sorted(one.labels.items())}": one.value for one in told}
