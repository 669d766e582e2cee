"""llama.cpp's server with a DSpark drafter, in a process of its own (the wheel `xllamacpp`).

A bad GGUF file aborts the process that loads it, so that is never this one. Prompts are token ids: no template and no
tokenizer stands between what is asked here and there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from typing_extensions import override

from dspark.engines.client import Completion, Drafting, Served, Streamed, file_name
from dspark.engines.counters import Counters
from dspark.engines.http import HttpClient
from dspark.engines.llamacpp_log import parse_blocks, parse_drafting, parse_metrics
from dspark.errors import DataError, PreflightError, ServiceError

TIMES_SHOWN = 4  # the log level that shows the time spent on drafting
DRAFTS_SHOWN = 5  # the one that shows every drafted token
_CHILD = Path(__file__).with_name("llamacpp_child.py")
_UNKNOWN = "b0-unknown"
_TAIL = 12  # lines of the log that an error quotes
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class LlamaCppSettings:
    """How the server is started.

    Attributes:
        target, drafter: GGUF files; no drafter: plain decoding.
        n_max: draft tokens per block at most; the engine lowers it to the drafter's block size.
        p_min: drafting stops at a confidence below it; 0: whole blocks.
        context: positions, shared by the slots.
        slots: requests served at a time.
        threads: of the computation.
        memory: of keys and values, of target and drafter.
        flash_attention: as the engine chooses, which is on; False: off. On a CPU it sums in half precision, whatever
            the memory's type: logits move in the third digit.
        log_level: 4 shows the time spent on drafting; 5 every drafted token, and slows the server down.
    """

    target: Path
    drafter: Path | None = None
    n_max: int = 1
    p_min: float = 0.0
    context: int = 2048
    slots: int = 1
    threads: int = 1
    memory: Literal["F32", "F16", "Q8_0"] = "F16"
    flash_attention: bool = True
    log_level: int = 3


class LlamaCppClient(HttpClient):
    """A llama.cpp server that runs somewhere, started with `--metrics`.

    Args:
        address: such as `http://127.0.0.1:8080`.
        patience: seconds until it must have answered.
    Raises:
        SettingsError: no such address.
    """

    name = "llamacpp"
    engine = "llama.cpp"
    how_to_start = "start it with `llama-server -m TARGET -md DRAFTER --spec-type draft-dspark --metrics`"
    cuts_last_block = True
    how_to_draft = (
        "start it with the drafter (`-md DRAFTER.gguf --spec-type draft-dspark --spec-draft-n-max GAMMA`), and with "
        "`--spec-draft-p-min 0`"
    )

    def served(self) -> Served:
        """Its build and the file of the model that it serves.

        Raises:
            ServiceError: it does not answer, or not as llama.cpp's server does.
        """
        said = self.properties()
        build = str(said.get("build_info", _UNKNOWN))  # servers from a wheel were built without one
        known = "of an unknown build" if build == _UNKNOWN else build
        return Served(f"llama.cpp {known}", file_name(said.get("model_path")))

    def properties(self) -> dict[str, Any]:
        """What the server says about itself: model file, slots, build, default settings.

        Raises:
            ServiceError: it does not answer, or not as llama.cpp's server does.
        """
        answer = self.ask_object("/props")
        if "default_generation_settings" not in answer:
            raise self.failure("it does not answer /props as llama.cpp's server does")
        return answer

    @cached_property
    def room(self) -> int:
        """Positions of a request, prompt and reply together; asked once."""
        settings = self.properties()["default_generation_settings"]
        if not isinstance(settings, dict) or not isinstance(settings.get("n_ctx"), int):
            raise self.failure("its /props does not say how long a request may be")
        return int(settings["n_ctx"])

    def complete(self, prompt: Sequence[int], max_new_tokens: int) -> Completion:
        """Continue a prompt greedily.

        Args:
            prompt: token ids.
            max_new_tokens: the reply's limit.
        Raises:
            DataError: the prompt is empty or does not fit into the context.
            ServiceError: the engine died or refused.
        """
        request = self._question(prompt, max_new_tokens)
        before = self.counters()
        began = time.perf_counter()
        answer = self.ask_object("/completion", request)
        seconds = time.perf_counter() - began
        ended, predicted = answer["stop_type"] == "eos", answer["tokens_predicted"]
        return Completion(
            # The ending token is among them in some versions.
            token_ids=tuple(answer["tokens"][: predicted - ended]),
            ended=ended,
            predicted=predicted,
            seconds=seconds,
            counters=self.counters() - before,
        )

    def stream(self, prompt: Sequence[int], max_new_tokens: int, *, endless: bool = False) -> Streamed:
        """As `complete`, with the time at which each token came; what it counted has to be asked for afterwards.

        Args:
            endless: go on to the limit, whatever token would end the reply.
        Raises:
            DataError, ServiceError: as `complete`.
        """
        question = {**self._question(prompt, max_new_tokens), "stream": True, "ignore_eos": endless}
        tokens: list[int] = []
        seconds: list[float] = []
        began = time.perf_counter()
        for event in self.events("/completion", question):
            came = event.get("tokens", [])
            seconds += [time.perf_counter() - began] * len(came)
            tokens += came
        return Streamed(tuple(tokens), tuple(seconds), time.perf_counter() - began)

    def facts(self) -> dict[str, Any]:
        """Its version: limits of a server that dspark starts are those of what it measures."""
        return {} if self.properties().get("build_info") == _UNKNOWN else {"engine_version": self.served().engine}

    def totals(self) -> Counters:
        """What `counters` says."""
        return self.counters()

    def counters(self) -> Counters:
        """Totals since the server started.

        Raises:
            ServiceError: the engine died, or does not count.
        """
        return parse_metrics(self.get("/metrics").decode("utf-8"))

    def _question(self, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        room = self.room
        if not prompt or len(prompt) + max_new_tokens > room:
            raise DataError(
                f"a prompt of {len(prompt)} tokens and a reply of {max_new_tokens} do not fit into {room} positions",
                "give the engine a longer context, ask for fewer tokens, or leave such prompts out",
            )
        return {
            "prompt": list(prompt),
            "n_predict": max_new_tokens,
            "temperature": 0.0,
            "cache_prompt": False,
            "return_tokens": True,
        }


class LlamaCppServer(LlamaCppClient):
    """A server in a child process; use as `with LlamaCppServer(settings, log) as server`.

    Args:
        settings: what to serve.
        log: file for what the engine says; written anew.
        patience: seconds until the server must be up, and until it must have answered.
    Raises:
        PreflightError: xllamacpp is not installed, or a file is missing.
        ServiceError: the engine does not start; quotes the end of its log.
    """

    def __init__(self, settings: LlamaCppSettings, log: Path, *, patience: float = 600.0) -> None:
        engine_version()
        for path in (settings.target, settings.drafter):
            if path is not None and not path.is_file():
                raise PreflightError(f"{path}: file not found", "write the GGUF files first")
        self.settings, self.log = settings, log
        self._patience = patience
        described = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(settings).items()}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._child = subprocess.Popen(
                [sys.executable, "-P", str(_CHILD)],
                # An engine that aborts would look for its own backtrace first, which took it a minute.
                env={**os.environ, "GGML_NO_BACKTRACE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        try:
            self._send(json.dumps(described).encode("ascii") + b"\n")
            super().__init__(self._await_address(), patience=patience)
            self.get("/health")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LlamaCppServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server and wait until its process is gone; killed if it does not go by itself."""
        child = self._child
        for ask in (self._hang_up, child.terminate, child.kill):
            if child.poll() is not None:
                break
            ask()
            try:
                child.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        self._hang_up()
        if child.stdout is not None:
            child.stdout.close()

    @cached_property
    @override
    def room(self) -> int:
        """Positions of a request, prompt and reply together."""
        return self.settings.context // self.settings.slots

    @override
    def complete(self, prompt: Sequence[int], max_new_tokens: int) -> Completion:
        """As the client's; with the drafted blocks where the log shows them."""
        start = self.log.stat().st_size
        reply = super().complete(prompt, max_new_tokens)
        if self.settings.log_level < DRAFTS_SHOWN or self.settings.slots != 1:
            return reply
        return replace(reply, blocks=tuple(parse_blocks(self._log_of_requests(start, 1))))

    def drafting(self, start: int, requests: int) -> Drafting:
        """The time spent on drafting since the server started, after so many requests have ended since byte `start`.

        Needs log level 4; nothing without a drafter.
        """
        return parse_drafting(self._log_of_requests(start, requests))

    def _log_of_requests(self, start: int, requests: int) -> list[str]:
        """The log from byte `start` on, once the engine's own thread has written it up to the end of the requests."""
        deadline = time.monotonic() + self._patience
        while True:
            with self.log.open("rb") as handle:
                handle.seek(start)
                text = handle.read().decode("utf-8", errors="replace")
            if text.count(" | stop processing: ") >= requests:
                return text.splitlines()
            if time.monotonic() > deadline or self._child.poll() is not None:
                raise self.failure(f"its log does not show the end of {requests} requests")
            time.sleep(0.01)

    def _send(self, line: bytes) -> None:
        assert self._child.stdin is not None  # a pipe was asked for
        try:
            self._child.stdin.write(line)
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self.failure("it did not start") from None

    def _hang_up(self) -> None:
        if self._child.stdin is not None and not self._child.stdin.closed:
            try:
                self._child.stdin.close()
            except BrokenPipeError:
                return  # it is gone

    def _await_address(self) -> str:
        assert self._child.stdout is not None  # a pipe was asked for
        ready, _, _ = select.select([self._child.stdout], [], [], self._patience)
        line = self._child.stdout.readline().decode("utf-8").strip() if ready else ""
        if not line:
            raise self.failure("it did not start" if ready else f"it was not up after {self._patience:g} s")
        return line

    @override
    def failure(self, what: str) -> ServiceError:
        """The error for what happened, with how the process ended and what it said last."""
        try:
            self._child.wait(1.0)  # one that is dying has cut the connection already
        except subprocess.TimeoutExpired:
            ended = ""
        else:
            ended = f" (its process ended with {_exit(self._child.returncode)})"
        lines = [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        said = "".join(f"\n    {line[:200]}" for line in lines[-_TAIL:]) or " nothing"
        return ServiceError(
            f"llama.cpp with {self.settings.target.name}: {what}{ended}; it said last:{said}", f"whole log: {self.log}"
        )


def engine_version() -> str:
    """Name and version of the engine, such as `xllamacpp 2026.10.11549`.

    Raises:
        PreflightError: it is not installed.
    """
    if importlib.util.find_spec("xllamacpp") is None:
        raise PreflightError("llama.cpp's server (xllamacpp) is not installed", "pip install 'dspark[llamacpp]'")
    return f"xllamacpp {importlib.metadata.version('xllamacpp')}"


def _exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
