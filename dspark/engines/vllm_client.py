"""A vLLM server that runs somewhere, by its OpenAI-compatible protocol (release 0.32.0; engine-formats.md, 2.4).

A server started with `--per-request-spec-decode-metrics` says in each reply what was accepted of it. Others count for
everybody together in Prometheus; there the difference around a request is taken, which other traffic would disturb.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from dspark.engines.client import Completion, Served, Streamed, file_name
from dspark.engines.counters import Counters, of_histogram
from dspark.engines.http import HttpClient
from dspark.engines.prometheus import parse_samples, speculation_counters
from dspark.errors import DataError, ServiceError

METRICS = "vllm:spec_decode_num_"  # the counters of speculation begin so


class _NotSpeculating(ServiceError):
    """The server counts no drafts."""


class VLLMClient(HttpClient):
    """The server's `/v1/completions`, `/v1/models`, `/version` and `/metrics`.

    Args:
        address: such as `http://127.0.0.1:8000`.
        patience: seconds until it must have answered.
    Raises:
        SettingsError: no such address.
    """

    name = "vllm"
    engine = "vLLM"
    how_to_start = "start it with `bash engines/vllm/launch.sh` of a package"
    cuts_last_block = False
    how_to_draft = (
        "start it with `bash engines/vllm/launch.sh` of a package: the drafter in --speculative-config and "
        "enable_adaptive_verification false, so that whole blocks are verified"
    )

    def served(self) -> Served:
        """Its version and the model that it serves.

        Raises:
            ServiceError: it does not answer, or not as vLLM does.
        """
        version = self.ask_object("/version").get("version")
        if version is None:
            raise self.failure("it does not answer /version as vLLM does")
        return Served(f"vLLM {version}", file_name(self._model.get("root") or self._model["id"]))

    def facts(self) -> dict[str, Any]:
        """Its version and its longest request; it tells no more."""
        return {"engine_version": self.served().engine, "context": self._model.get("max_model_len")}

    def totals(self) -> Counters | None:
        """What `counters` says; None of a server without a drafter."""
        try:
            return self.counters()
        except _NotSpeculating:
            return None

    def counters(self) -> Counters:
        """Totals of all engines behind the address since they started.

        Raises:
            ServiceError: it does not answer, or does not speculate.
        """
        samples = parse_samples(self.get("/metrics").decode("utf-8", errors="replace"))
        found, missing = speculation_counters(samples, METRICS)
        if missing:
            raise _NotSpeculating(
                f"vLLM at {self.address}: its /metrics lacks {', '.join(METRICS + name for name in missing)}",
                self.how_to_draft,
            )
        return found

    def complete(self, prompt: Sequence[int], max_new_tokens: int) -> Completion:
        """Continue a prompt greedily.

        Raises:
            DataError: the prompt is empty, or does not fit.
            ServiceError: the engine died or refused.
        """
        question = self._question(prompt, max_new_tokens)
        before = self.totals()
        began = time.perf_counter()
        answer = self.ask_object("/v1/completions", question)
        seconds = time.perf_counter() - began
        choice = self._choice(answer)
        ids = self._ids(choice)
        ended = self._ended(choice)
        own = (answer.get("metrics") or {}).get("speculative_decoding")
        if isinstance(own, dict):
            counters, shortened = counters_of(own)
        elif before is not None:
            counters, shortened = of_totals(self.counters() - before, self._gamma(before))
        else:
            counters, shortened = Counters(), False
        return Completion(
            token_ids=ids[:-1] if ended else ids,  # the token that ended it is read out
            ended=ended,
            predicted=int((answer.get("usage") or {}).get("completion_tokens", len(ids))),
            seconds=seconds,
            counters=counters,
            shortened=shortened,
        )

    def stream(self, prompt: Sequence[int], max_new_tokens: int, *, endless: bool = False) -> Streamed:
        """As `complete`, with the time at which each token came.

        Raises:
            DataError, ServiceError: as `complete`.
        """
        question = self._question(prompt, max_new_tokens) | {"stream": True, "ignore_eos": endless}
        ids: list[int] = []
        seconds: list[float] = []
        ended = False
        began = time.perf_counter()
        for event in self.events("/v1/completions", question):
            if not event.get("choices"):
                continue  # the usage, at the end
            choice = self._choice(event)
            came = choice.get("token_ids") or []
            ids += (int(token) for token in came)
            seconds += [time.perf_counter() - began] * len(came)
            if choice.get("finish_reason") is not None:
                ended = self._ended(choice)
        if ended:
            ids, seconds = ids[:-1], seconds[:-1]
        return Streamed(tuple(ids), tuple(seconds), time.perf_counter() - began)

    @property
    def room(self) -> int | None:
        """Positions of a request, prompt and reply together; None: it does not say."""
        longest = self._model.get("max_model_len")
        return longest if isinstance(longest, int) else None

    @cached_property
    def _model(self) -> dict[str, Any]:
        models = self.ask_object("/v1/models").get("data")
        if not isinstance(models, list) or not models or "id" not in models[0]:
            raise self.failure("its /v1/models names no model")
        return dict(models[0])

    def _gamma(self, totals: Counters) -> int | None:
        """Drafts of a whole block, as far as the totals so far tell: they have seen whole blocks, or none at all."""
        return totals.drafted // totals.steps if totals.steps and totals.drafted % totals.steps == 0 else None

    def _question(self, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        longest = self.room
        if not prompt or (longest is not None and len(prompt) + max_new_tokens > longest):
            raise DataError(
                f"a prompt of {len(prompt)} tokens and a reply of {max_new_tokens} do not fit into {longest} positions",
                "give the engine a longer context, ask for fewer tokens, or leave such prompts out",
            )
        return {
            "model": self._model["id"],
            "prompt": list(prompt),
            "max_tokens": max_new_tokens,
            "temperature": 0.0,
            "return_token_ids": True,
        }

    def _choice(self, answer: dict[str, Any]) -> dict[str, Any]:
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise self.failure(f"its reply has no choices: {str(answer)[:200]}")
        return choices[0]

    def _ids(self, choice: dict[str, Any]) -> tuple[int, ...]:
        ids = choice.get("token_ids")
        if not isinstance(ids, list):
            raise self.failure("its reply has no token_ids, which were asked for")
        return tuple(int(token) for token in ids)

    def _ended(self, choice: dict[str, Any]) -> bool:
        """Whether a token ended the reply; anything but that and the limit is a failure."""
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise self.failure(f"it ended a reply with {reason!r}")
        return bool(reason == "stop")


def counters_of(own: dict[str, Any]) -> tuple[Counters, bool]:
    """What a reply's `metrics.speculative_decoding` counts, and whether blocks were verified in part.

    Under adaptive verification the drafts that were left out count as neither accepted nor refused.
    """
    drafted, steps = int(own.get("num_draft_tokens", 0)), int(own.get("num_spec_steps", 0))
    whole = int(own.get("num_spec_tokens", 0)) * steps
    return of_histogram([int(count) for count in own.get("acceptance_histogram", [])], drafted), drafted != whole


def of_totals(counted: Counters, gamma: int | None) -> tuple[Counters, bool]:
    """A difference of totals, and whether blocks were verified in part: what they hold on average is no whole number.

    Args:
        gamma: drafts of a whole block, if it is known.
    """
    if not counted.steps:
        return counted, False
    per_step, rest = divmod(counted.drafted, counted.steps)
    return counted, bool(rest) or (gamma is not None and per_step < gamma)
