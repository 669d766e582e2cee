"""The process that holds llama.cpp: a script of its own, because a bad GGUF file ends the interpreter that loads it.

Reads its settings as one line of JSON from stdin, writes the server's address as one line to stdout, and serves until
stdin closes, which it also does when the parent dies in whatever way. Imports nothing of dspark, so that it is quick.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any


def main() -> None:
    """Serve until stdin is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when to stop
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the engine prints is log, wherever it prints it
    settings = json.loads(sys.stdin.readline())
    closed = threading.Event()
    threading.Thread(target=_watch, args=(closed,), daemon=True).start()

    import xllamacpp

    try:
        server = xllamacpp.Server(_parameters(xllamacpp, settings))
    except RuntimeError as reason:
        sys.exit(str(reason))  # the log has said more already
    answer.write(server.listening_address + "\n")
    answer.flush()
    closed.wait()
    del server  # ends its threads and writes the rest of the log


def _watch(closed: threading.Event) -> None:
    while sys.stdin.readline():
        pass
    closed.set()


def _parameters(xllamacpp: Any, settings: dict[str, Any]) -> Any:
    parameters = xllamacpp.CommonParams()
    kinds = xllamacpp.ggml_type
    memory = {"F32": kinds.GGML_TYPE_F32, "F16": kinds.GGML_TYPE_F16, "Q8_0": kinds.GGML_TYPE_Q8_0}[settings["memory"]]
    parameters.model.path = settings["target"]
    parameters.n_ctx = settings["context"]
    parameters.n_parallel = settings["slots"]
    parameters.cpuparams.n_threads = settings["threads"]
    parameters.cpuparams_batch.n_threads = settings["threads"]
    parameters.cache_type_k = parameters.cache_type_v = memory
    if not settings["flash_attention"]:
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    # Measurements begin from nothing: no prompt of an earlier request is found again.
    parameters.cache_prompt = False
    parameters.cache_ram_mib = 0
    parameters.endpoint_metrics = True
    parameters.warmup = False
    parameters.fit_params = False
    parameters.verbosity = settings["log_level"]
    if settings["drafter"] is not None:
        kind = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK
        parameters.speculative.types = [kind]
        draft = parameters.speculative.draft
        draft.mparams.path = settings["drafter"]
        draft.n_max = settings["n_max"]  # its default is 3, whatever the drafter's block size
        draft.p_min = settings["p_min"]
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = settings["threads"]
        draft.cache_type_k = draft.cache_type_v = memory
    return parameters


if __name__ == "__main__":
    main()
