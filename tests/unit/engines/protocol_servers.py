"""Servers that speak as SGLang 0.5.23 and vLLM 0.32.0 do, with a tiny target and drafter inside (engine-formats.md).

What they count comes from the decoding loop that nothing ends, cut here as these engines cut it; nothing of the code
that is tested is used. They stand in for engines that need a GPU, and prove no more than that both sides read the
documented formats alike.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from dspark.decoding.drafting import TorchProposer
from dspark.decoding.draws import CounterDraws
from dspark.decoding.loop import Batch
from dspark.decoding.policies import Fixed


@dataclass
class Block:
    """A drafted block, and how many of its drafts are the target's own text, whatever was verified of it."""

    said: int  # tokens of the reply before it, the anchor among them
    drafted: list[int]
    confidences: list[float]
    right: int


@dataclass
class Reply:
    """One request as an engine runs it: `accepted` drafts of each step, the last one counted to its end."""

    token_ids: list[int]
    ended: bool
    accepted: list[int]
    blocks: list[Block] = field(default_factory=list)


@dataclass
class Engine:
    """A tiny engine.

    Attributes:
        verified: drafts of each block that are verified; None: all.
    """

    target: Any
    drafter: Any
    eos_token_ids: frozenset[int] = frozenset()
    verified: int | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)  # a target captures its taps for one pass at a time

    @property
    def gamma(self) -> int:
        return int(self.drafter.config.gamma)

    def run(self, prompt: Sequence[int], limit: int, *, endless: bool = False) -> Reply:
        batch = Batch(
            self.target, TorchProposer(self.drafter), [prompt], [0], max_new_tokens=limit + self.gamma + 1,
            policy=Fixed(self.verified), temperature=0.0, draws=CounterDraws([0]), eos_token_ids=frozenset(),
        )  # fmt: skip
        with self.lock:
            batch.prefill()
            while batch.active:
                batch.cycle()
        decoded = batch.finished()[0]
        tokens, eos = list(decoded.token_ids), frozenset() if endless else self.eos_token_ids
        accepted, blocks, said = [], [], 1
        for number, (right, committed) in enumerate(
            zip(decoded.cycles.accepted, decoded.cycles.committed, strict=True)
        ):
            if said >= limit or eos & set(tokens[:said]):
                break
            accepted.append(int(right))
            drafted = decoded.cycles.drafted[number].tolist()
            equal = [mine == text for mine, text in zip(drafted, tokens[said:], strict=False)]
            logits = decoded.cycles.confidence_logits[number].astype(float)
            stated = (1 / (1 + np.exp(-logits))).tolist()
            blocks.append(Block(said, drafted, stated, [*equal, False].index(False)))
            said += int(committed)
        text = tokens[:limit]
        end = next((place for place, token in enumerate(text) if token in eos), None)
        return Reply(text if end is None else text[: end + 1], end is not None, accepted, blocks)

    def histogram(self, accepted: Sequence[int]) -> list[int]:
        return [sum(one == count for one in accepted) for count in range(self.gamma + 1)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    double: Any

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._answer(self.double.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        answer = self.double.post(self.path, body)
        if isinstance(answer, Iterator):
            self._head(200, "text/event-stream")
            for event in answer:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            self._answer(answer)

    def _answer(self, answer: Any) -> None:
        if answer is None:
            answer = (404, {"detail": "Not Found"})
        status, value = answer if isinstance(answer, tuple) else (200, answer)
        text = isinstance(value, str)
        self._head(status, "text/plain" if text else "application/json")
        self.wfile.write(value.encode() if text else json.dumps(value).encode())

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()


@contextmanager
def serving(double: Any) -> Iterator[str]:
    """The address at which a double answers meanwhile."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"double": double}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class SGLangDouble:
    """`/server_info`, `/generate`, `/flush_cache`, `/abort_request` and `/set_internal_state`."""

    def __init__(self, engine: Engine, *, windows: bool = False, incremental: bool = False, **information: Any) -> None:
        self.engine, self.windows, self.incremental = engine, windows, incremental
        self.information = {
            "model_path": "/models/org/tiny",
            "version": "0.5.23",
            "speculative_algorithm": "DSPARK",
            "speculative_num_draft_tokens": engine.gamma + 1,
            "disable_cuda_graph": False,
            "tp_size": 1,
            "internal_states": [{"dp_size": 1}],
        } | information

    def get(self, path: str) -> Any:
        return self.information if path == "/server_info" else None

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path != "/generate":
            return None
        self.engine.requests.append(body)
        sampling = body["sampling_params"]
        assert sampling["temperature"] == 0.0
        reply = self.engine.run(body["input_ids"], sampling["max_new_tokens"], endless=sampling["ignore_eos"])
        return self.events(reply) if body.get("stream") else self.answer(reply, len(reply.token_ids))

    def answer(self, reply: Reply, said: int, begin: int = 0) -> dict[str, Any]:
        finished = said == len(reply.token_ids)
        reason = {"type": "stop", "matched": reply.token_ids[-1]} if reply.ended else {"type": "length", "length": said}
        meta = {
            "id": "0", "prompt_tokens": 1, "completion_tokens": said,
            "finish_reason": reason if finished else None,
        }  # fmt: skip
        if finished and reply.accepted:
            steps, gamma = len(reply.accepted), self.engine.gamma
            meta |= {
                "spec_verify_ct": steps,
                "spec_num_proposed_drafts": steps * gamma,
                "spec_num_correct_drafts": sum(reply.accepted),
                "spec_accept_rate": sum(reply.accepted) / (steps * gamma),
                "spec_accept_length": said / steps,
                # The engine lengthens the list as larger counts occur.
                "spec_correct_drafts_histogram": self.engine.histogram(reply.accepted)[: max(reply.accepted) + 1],
            }
            if self.windows:
                window = (gamma if self.engine.verified is None else self.engine.verified) + 1
                meta["spec_cap_lens_histogram"] = [0] * window + [steps]
        return {"text": "", "output_ids": reply.token_ids[begin:said], "meta_info": meta}

    def events(self, reply: Reply) -> Iterator[dict[str, Any]]:
        """The whole text so far each time, or with `--incremental-streaming-output` what is new."""
        said = 0
        for count in [1, *(one + 1 for one in reply.accepted)]:
            begin, said = said, min(said + count, len(reply.token_ids))
            yield self.answer(reply, said, begin if self.incremental else 0)


class PlainSGLangDouble(SGLangDouble):
    """The same without a drafter."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, speculative_algorithm=None)

    def answer(self, *arguments: Any) -> dict[str, Any]:
        answer = super().answer(*arguments)
        meta = {name: value for name, value in answer["meta_info"].items() if not name.startswith("spec_")}
        return answer | {"meta_info": meta}


class SGLangRecordingDouble(SGLangDouble):
    """A server in `cap-accept` with SGLANG_DSPARK_DEBUG_DUMP=core,reqs.

    It verifies whole blocks and accepts at most `engine.verified` of their drafts.
    """

    def __init__(self, engine: Engine, **state: Any) -> None:
        super().__init__(engine)
        self.names = itertools.count()
        self.steps: list[dict[str, Any]] = []
        dump = {"mode": "cap-accept", "gamma": engine.gamma, "components": ["core", "reqs"], "records": self.steps}
        self.information["internal_states"] = [{"dspark_info_record": dump | state}]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        assert path == "/generate" and not body.get("stream")
        sampling, prompt = body["sampling_params"], body["input_ids"]
        reply = self.engine.run(prompt, sampling["max_new_tokens"], endless=sampling["ignore_eos"])
        answer = self.answer(reply, len(reply.token_ids))
        answer["meta_info"]["id"] = rid = f"request {next(self.names)}"
        cap = self.engine.gamma if self.engine.verified is None else self.engine.verified
        for block in reply.blocks:
            correct = min(block.right, cap)
            fields = {
                "rid": rid, "req_pool_index": 0, "prefix_len": len(prompt) + block.said - 1, "verify_len": cap + 1,
                "acc_len": correct + 1, "correct_drafts": correct, "cap_trim": block.right - correct,
                "bonus_token": 0, "draft_tokens": block.drafted,
                "confidence": [round(value, 4) for value in block.confidences],
                "survival": np.cumprod(block.confidences).round(4).tolist(),
            }  # fmt: skip
            self.record(fields)
        return answer

    def record(self, *requests: dict[str, Any]) -> None:
        """One more step."""
        self.steps.append({"forward_ct": len(self.steps) + 1, "bs": len(requests), "reqs": list(requests)})


class SGLangProfilingDouble(SGLangDouble):
    """A server in profiling mode: it records its steps, which take what `milliseconds(requests, tokens)` says.

    The first and the last step of a round run with one request fewer, as requests come and go one after the other.
    """

    def __init__(self, engine: Engine, milliseconds: Any, *, mode: str = "compact", **dump: Any) -> None:
        super().__init__(engine)
        self.milliseconds = milliseconds
        self.forced: list[float | None] = []
        self.records: list[dict[str, Any]] = [{"forward_ct": 7, "num_running_reqs": 1}]  # of before
        self.flushed = 0
        state = {
            "mode": mode, "gamma": engine.gamma, "verify_num_draft_tokens": engine.gamma + 1,
            "components": ["core", "draft_gpu_time", "step_cpu_time"], "simulate_acc_len": 1.0,
            "records": self.records,
        } | dump  # fmt: skip
        self.information["internal_states"] = [{"dp_size": 1, "dspark_info_record": state}]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/flush_cache":
            self.flushed += 1
            return "Cache flushed."
        if path == "/set_internal_state":
            self.forced.append(body["server_args"]["dspark_force_budget_frac"])
            return [{"updated": True, "server_args": body["server_args"]}]
        prompts, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        assert body["sampling_params"]["ignore_eos"] is True
        for number in range(count - 1):
            running = len(prompts) - (number in (0, count - 2) and len(prompts) > 1)
            share = self.forced[-1] if self.forced else 1.0
            tokens = running + int(share * running * self.engine.gamma)
            self.records.append(
                {
                    "forward_ct": self.records[-1]["forward_ct"] + 1, "bs": running, "mode": "compact",
                    "num_running_reqs": running, "num_verify_tokens": tokens,
                    "step_cpu_ms": self.milliseconds(running, tokens) * (9 if number < 2 else 1),
                    "draft_gpu_ms": 2.0,
                }
            )  # fmt: skip
        return [{"output_ids": [1] * count, "meta_info": {}} for _ in prompts]


class VLLMDouble:
    """`/version`, `/v1/models`, `/metrics` and `/v1/completions`.

    Args:
        own: whether replies carry counts of their own (`--per-request-spec-decode-metrics`).
        before: counts that the totals hold already.
    """

    def __init__(self, engine: Engine, *, own: bool = True, before: Sequence[Sequence[int]] = ()) -> None:
        self.engine, self.own = engine, own
        self.seen: list[int] = [count for one in before for count in one]
        self.model = {"id": "tiny", "root": "/models/org/tiny", "max_model_len": 500}

    def get(self, path: str) -> Any:
        return {
            "/version": {"version": "0.32.0"},
            "/v1/models": {"object": "list", "data": [self.model]},
            "/metrics": self.metrics(),
        }.get(path)

    @property
    def verified(self) -> int:
        return self.engine.gamma if self.engine.verified is None else self.engine.verified

    def metrics(self) -> str:
        labels, prefix = 'engine="0",model_name="tiny"', "vllm:spec_decode_num_"
        per_position = self.engine.histogram(self.seen)
        lines = [
            f"# HELP {prefix}drafts_total Number of spec decoding drafts.",
            f"{prefix}drafts_total{{{labels}}} {float(len(self.seen))}",
            f"{prefix}drafts_created{{{labels}}} 1.78e+09",
            f"{prefix}draft_tokens_total{{{labels}}} {float(len(self.seen) * self.verified)}",
            f"{prefix}accepted_tokens_total{{{labels}}} {float(sum(self.seen))}",
            *(
                f'{prefix}accepted_tokens_per_pos_total{{{labels},position="{place}"}} '
                f"{float(sum(per_position[place + 1 :]))}"
                for place in range(self.engine.gamma)
            ),
            'vllm:request_success_total{finished_reason="stop"} 3.0',
        ]
        return "\n".join(lines) + "\n"

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path != "/v1/completions":
            return None
        self.engine.requests.append(body)
        assert body["model"] == "tiny" and body["temperature"] == 0.0 and body["return_token_ids"] is True
        reply = self.engine.run(body["prompt"], body["max_tokens"], endless=body.get("ignore_eos", False))
        self.seen += reply.accepted
        return self.events(reply) if body.get("stream") else self.answer(reply)

    def answer(self, reply: Reply) -> dict[str, Any]:
        reason = "stop" if reply.ended else "length"
        answer = {
            "object": "text_completion",
            "model": "tiny",
            "choices": [{"index": 0, "text": "", "token_ids": reply.token_ids, "finish_reason": reason}],
            "usage": {"prompt_tokens": 1, "completion_tokens": len(reply.token_ids)},
        }
        steps = len(reply.accepted)
        if self.own and steps:
            answer["metrics"] = {
                "speculative_decoding": {
                    "mean_acceptance_length": 1 + sum(reply.accepted) / steps,
                    "draft_acceptance_rate": sum(reply.accepted) / (steps * self.verified),
                    "acceptance_histogram": self.engine.histogram(reply.accepted),
                    "num_spec_steps": steps,
                    "num_accepted_draft_tokens": sum(reply.accepted),
                    "num_draft_tokens": steps * self.verified,
                    "num_spec_tokens": self.engine.gamma,
                }
            }
        return answer

    def events(self, reply: Reply) -> Iterator[dict[str, Any]]:
        said = 0
        for count in [1, *(one + 1 for one in reply.accepted)]:
            begin, said = said, min(said + count, len(reply.token_ids))
            reason = ("stop" if reply.ended else "length") if said == len(reply.token_ids) else None
            yield {"choices": [{"index": 0, "token_ids": reply.token_ids[begin:said], "finish_reason": reason}]}
        yield {"choices": [], "usage": {"completion_tokens": said}}


class PlainVLLMDouble(VLLMDouble):
    """The same without a drafter."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, own=False)

    def metrics(self) -> str:
        return "vllm:num_requests_running 0\n"
