"""A SGLang server that runs somewhere, by its native protocol (release 0.5.23; engine-formats.md, 1.9).

Every reply carries what was accepted of its own blocks, so that other traffic disturbs times but no counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from dspark.engines.client import Completion, Served, Streamed, file_name
from dspark.engines.counters import Counters, of_histogram
from dspark.engines.http import HttpClient
from dspark.errors import DataError, ServiceError

ALGORITHM = "DSPARK"
_PARALLEL = {"tp": "tp_size", "dp": "dp_size", "pp": "pp_size"}


class SGLangClient(HttpClient):
    """The server's `/generate` and `/server_info`.

    Args:
        address: such as `http://127.0.0.1:30000`.
        patience: seconds until it must have answered.
    Raises:
        SettingsError: no such address.
    """

    name = "sglang"
    engine = "SGLang"
    how_to_start = "start it with `bash engines/sglang/launch.sh` of a package"
    cuts_last_block = False
    how_to_draft = (
        "start it with `--speculative-algorithm DSPARK`, the drafter, and SGLANG_RAGGED_VERIFY_MODE=static, "
        "in which it verifies whole blocks"
    )

    def information(self) -> dict[str, Any]:
        """Its arguments, version and the state of its schedulers.

        Raises:
            ServiceError: it does not answer, or not as SGLang does.
        """
        found = self.ask_object("/server_info")
        if "model_path" not in found or not isinstance(found.get("internal_states"), list):
            raise self.failure("it does not answer /server_info as SGLang does")
        return found

    def served(self) -> Served:
        """Its version, the model that it serves, and the length of its blocks.

        Raises:
            ServiceError: as `information`, or it speculates with another kind of drafter.
        """
        return self._served(self.information())

    def _served(self, found: dict[str, Any]) -> Served:
        algorithm = found.get("speculative_algorithm")
        if algorithm not in (ALGORITHM, None):
            raise ServiceError(
                f"SGLang at {self.address} speculates with {algorithm!r}, not {ALGORITHM}", self.how_to_draft
            )
        tokens = found.get("speculative_num_draft_tokens")
        gamma = tokens - 1 if algorithm is not None and isinstance(tokens, int) else None
        return Served(f"SGLang {found.get('version', 'of an unknown version')}", file_name(found["model_path"]), gamma)

    def facts(self) -> dict[str, Any]:
        """Version, parallelism, dtypes and limits, as its arguments say."""
        found = self.information()
        return {
            "engine_version": self._served(found).engine,
            "parallel": {name: found.get(key) for name, key in _PARALLEL.items()},
            "max_num_seqs": found.get("max_running_requests"),
            "context": found.get("context_length"),
            "dtype": found.get("dtype"),
            "kv_dtype": found.get("kv_cache_dtype"),
            "quantisation": found.get("quantization"),
            "attention_backend": found.get("attention_backend"),
            "prefix_cache": not found.get("disable_radix_cache", False),
            "lora": bool(found.get("enable_lora")),
            "chunked_prefill": found.get("chunked_prefill_size"),
            "cuda_graphs": not found.get("disable_cuda_graph", False),
        }

    def complete(self, prompt: Sequence[int], max_new_tokens: int) -> Completion:
        """Continue a prompt greedily.

        Raises:
            DataError: the prompt is empty.
            ServiceError: the engine died or refused.
        """
        began = time.perf_counter()
        answer = self.ask_object("/generate", self._question(prompt, max_new_tokens))
        seconds = time.perf_counter() - began
        meta, ids = self._meta(answer), self._ids(answer)
        ended = self._ended(meta)
        counters, shortened = counters_of(meta)
        return Completion(
            token_ids=ids[:-1] if ended else ids,  # the token that ended it is read out
            ended=ended,
            predicted=int(meta.get("completion_tokens", len(ids))),
            seconds=seconds,
            counters=counters,
            shortened=shortened,
            request=None if meta.get("id") is None else str(meta["id"]),
        )

    def stream(self, prompt: Sequence[int], max_new_tokens: int, *, endless: bool = False) -> Streamed:
        """As `complete`, with the time at which each token came.

        Raises:
            DataError, ServiceError: as `complete`.
        """
        question = self._question(prompt, max_new_tokens, endless=endless) | {"stream": True}
        ids: tuple[int, ...] = ()
        seconds: list[float] = []
        ended, counters = False, Counters()
        began = time.perf_counter()
        for event in self.events("/generate", question):
            meta, came = self._meta(event), self._ids(event)
            # An event repeats the whole reply, unless the server was told to send what is new only.
            ids = came if len(came) == int(meta.get("completion_tokens", len(came))) else ids + came
            seconds += [time.perf_counter() - began] * (len(ids) - len(seconds))
            if meta.get("finish_reason") is not None:
                ended, (counters, _) = self._ended(meta), counters_of(meta)
        if ended:
            ids, seconds = ids[:-1], seconds[: len(ids) - 1]
        return Streamed(ids, tuple(seconds), time.perf_counter() - began, counters)

    @property
    def room(self) -> int | None:
        """Positions of a request, prompt and reply together; None: its context was left to its model.

        Raises:
            ServiceError: as `information`.
        """
        longest = self.information().get("context_length")
        return longest if isinstance(longest, int) else None

    def marks(self) -> list[int]:
        """The number of the last step that each data-parallel rank has recorded; -1: none yet.

        Raises:
            ServiceError: as `information`.
        """
        return [max((step["forward_ct"] for step in rank), default=-1) for rank in self._steps()]

    def steps_since(self, marks: Sequence[int]) -> list[list[dict[str, Any]]]:
        """The steps that each rank has recorded behind its mark, in order (SGLANG_DSPARK_DEBUG_DUMP).

        Raises:
            ServiceError: as `information`.
        """
        return [
            [step for step in rank if step["forward_ct"] > mark]
            for mark, rank in zip(marks, self._steps(), strict=True)
        ]

    def _steps(self) -> list[list[dict[str, Any]]]:
        states = self.information()["internal_states"]
        dumps = [state.get("dspark_info_record") or {} for state in states]
        return [sorted(dump.get("records", []), key=lambda step: step["forward_ct"]) for dump in dumps]

    def flush_cache(self) -> None:
        """Forget computed prompts: those with equal beginnings would not be computed again.

        Raises:
            ServiceError: it does not answer.
        """
        self.get("/flush_cache", {})

    def generate_together(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        """Let prompts be continued by exactly so many tokens, in one request, so that they begin together."""
        question = self._question(prompts[0], new_tokens, endless=True)
        self.ask("/generate", question | {"input_ids": [list(prompt) for prompt in prompts], "stream": False})

    def totals(self) -> None:
        """Nothing: each reply says what is its own."""

    def _question(self, prompt: Sequence[int], max_new_tokens: int, *, endless: bool = False) -> dict[str, Any]:
        if not prompt:
            raise DataError("an empty prompt cannot be continued", "leave such prompts out")
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": endless}
        return {"input_ids": list(prompt), "sampling_params": sampling}

    def _meta(self, answer: dict[str, Any]) -> dict[str, Any]:
        meta = answer.get("meta_info")
        if not isinstance(meta, dict):
            raise self.failure(f"its reply has no meta_info: {str(answer)[:200]}")
        return meta

    def _ids(self, answer: dict[str, Any]) -> tuple[int, ...]:
        ids = answer.get("output_ids")
        if not isinstance(ids, list):
            raise self.failure("its reply has no output_ids")
        return tuple(int(token) for token in ids)

    def _ended(self, meta: dict[str, Any]) -> bool:
        """Whether a token ended the reply; anything but that and the limit is a failure."""
        reason = meta.get("finish_reason")
        kind = reason.get("type") if isinstance(reason, dict) else reason
        if kind not in ("stop", "length"):
            raise self.failure(f"it ended a reply with {reason!r}")
        return bool(kind == "stop")


def counters_of(meta: dict[str, Any]) -> tuple[Counters, bool]:
    """What a reply's meta_info counts, and whether its scheduler verified less than whole blocks.

    The histogram counts steps by their accepted drafts. The number of proposed drafts is the nominal one, also where
    fewer were verified; the lengths of the verified windows, bonus token included, say whether that was so.
    """
    histogram = meta.get("spec_correct_drafts_histogram") or []
    steps = int(meta.get("spec_verify_ct", 0))
    if not steps:
        return Counters(), False
    drafted = int(meta.get("spec_num_proposed_drafts", 0))
    if sum(histogram) != steps:  # absent, or of another release
        return Counters(steps, drafted, int(meta.get("spec_num_correct_drafts", 0))), False
    windows = meta.get("spec_cap_lens_histogram") or []
    return of_histogram(histogram, drafted), any(windows[: drafted // steps + 1])
