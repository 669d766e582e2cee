"""The real llama.cpp server in its process, on files of a few kilobytes. No torch is needed for any of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.drafters.config import DrafterConfig
from dspark.engines import llamacpp
from dspark.engines.llamacpp import LlamaCppServer, LlamaCppSettings, engine_version
from dspark.errors import DataError, PreflightError, ServiceError, SettingsError
from dspark.export.dflash import drafter_keys, tensor_shapes
from dspark.io.gguffile import Key, Keys, TensorSource, write_gguf

needs_engine = pytest.mark.skipif(
    llamacpp.importlib.util.find_spec("xllamacpp") is None,
    reason="xllamacpp is not installed: pip install 'dspark[llamacpp]'",
)
VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, KV, WIDTH, GAMMA = 260, 32, 48, 3, 4, 2, 8, 3
MASK = "tokenizer.ggml.mask_token_id"
PROMPT = [1, 40, 41, 42, 50]


def tokenizer() -> dict[str, Key]:
    """The 256 bytes as GPT-2 spells them, and four control tokens."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {
        "tokenizer.ggml.model": Key("gpt2", "STRING"),
        "tokenizer.ggml.pre": Key("gpt-2", "STRING"),
        "tokenizer.ggml.tokens": Key(["<a>", "<b>", "<c>", "<d>", *alphabet], "STRING"),
        "tokenizer.ggml.token_type": Key([3] * 4 + [1] * 256, "INT32"),
        "tokenizer.ggml.merges": Key(["Ā Ā"], "STRING"),
        "tokenizer.ggml.eos_token_id": Key(2, "UINT32"),
        "tokenizer.ggml.add_bos_token": Key(False, "BOOL"),
    }


def sources(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, TensorSource]:
    generator = np.random.default_rng(seed)

    def source(shape: tuple[int, ...]) -> TensorSource:
        values = generator.standard_normal(shape).astype(np.float32) * 0.3 + (1.0 if len(shape) == 1 else 0.0)
        return TensorSource(shape, lambda: values, "F32")

    return {name: source(shape) for name, shape in shapes.items()}


def write_target(path: Path, **changes: Key) -> Path:
    counts = {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV,
        "rope.dimension_count": WIDTH,
        "vocab_size": VOCABULARY,
    }
    layer = {
        "attn_norm.weight": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
        "attn_q.weight": (HEADS * WIDTH, HIDDEN),
        "attn_k.weight": (KV * WIDTH, HIDDEN),
        "attn_v.weight": (KV * WIDTH, HIDDEN),
        "attn_output.weight": (HIDDEN, HEADS * WIDTH),
        "ffn_gate.weight": (INNER, HIDDEN),
        "ffn_up.weight": (INNER, HIDDEN),
        "ffn_down.weight": (HIDDEN, INNER),
    }
    shapes = {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
    shapes |= {f"blk.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()}
    keys = {
        "general.architecture": Key("llama", "STRING"),
        **{f"llama.{name}": Key(value, "UINT32") for name, value in counts.items()},
        "llama.rope.freq_base": Key(1e4, "FLOAT32"),
        "llama.attention.layer_norm_rms_epsilon": Key(1e-5, "FLOAT32"),
        **tokenizer(),
        **changes,
    }
    write_gguf(path, keys, sources(shapes, 0))
    return path


def write_drafter(path: Path, drop: str = "", **changes: Any) -> Path:
    config = DrafterConfig(
        gamma=GAMMA,
        layers=1,
        taps=(0, 1),
        mask_token_id=3,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        head_dim=WIDTH,
        rms_norm_eps=1e-5,
        rope={"rope_type": "default", "rope_theta": 1e4},
        max_position=256,
        vocab_size=VOCABULARY,
        markov_rank=4,
        target_model_type="llama",
        num_target_layers=LAYERS,
    )
    keys: Keys = {**drafter_keys(config), **tokenizer(), MASK: Key(3, "UINT32")}
    tensors = sources(tensor_shapes(config), 1)
    write_gguf(
        path,
        {name: key for name, key in keys.items() if name != drop},
        {name: tensor for name, tensor in tensors.items() if name != drop},
    )
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return write_target(folder / "target.gguf"), write_drafter(folder / "drafter.gguf")


def settings(files: tuple[Path, Path | None], **changes: Any) -> LlamaCppSettings:
    fields = {"n_max": GAMMA, "context": 64, "memory": "F32", "log_level": 5}
    return LlamaCppSettings(files[0], files[1], **(fields | changes))


@needs_engine
@pytest.mark.parametrize("drafts", [False, True])
def test_a_reply_is_what_stands_before_the_token_that_ended_it(files: tuple[Path, Path], tmp_path: Path, drafts: bool):
    """The same weights, with a token that they say made the ending one."""
    with LlamaCppServer(settings((files[0], None), log_level=1), tmp_path / "endless.log") as server:
        said = server.complete(PROMPT, 12).token_ids
    last = said[5]
    target = write_target(tmp_path / "t.gguf", **{"tokenizer.ggml.eos_token_id": Key(last, "UINT32")})
    with LlamaCppServer(settings((target, files[1] if drafts else None)), tmp_path / "log") as server:
        reply = server.complete(PROMPT, 12)
    assert reply.ended and reply.token_ids == said[: said.index(last)]
    assert reply.predicted == said.index(last) + 1


@needs_engine
def test_the_engine_drafts_counts_and_says_what_it_says_without_drafts(files: tuple[Path, Path], tmp_path: Path):
    with LlamaCppServer(settings(files), tmp_path / "log") as server:
        reply = server.complete(PROMPT, 12)
        again = server.complete(PROMPT, 12)
        with pytest.raises(DataError, match="a prompt of 60 tokens and a reply of 12 do not fit into 64 positions"):
            server.complete(PROMPT * 12, 12)
        with pytest.raises(DataError, match="a prompt of 0 tokens"):
            server.complete([], 12)
    assert server._child.returncode == 0
    with LlamaCppServer(settings((files[0], None), log_level=1), tmp_path / "plain.log") as server:
        plain = server.complete(PROMPT, 12)
    assert reply.token_ids == again.token_ids == plain.token_ids and len(reply.token_ids) == 12
    assert (plain.counters.steps, plain.blocks) == (0, ())
    # Each step accepts some drafts and adds one token; the first token is the prefill's, an undrafted last one no step.
    counters = reply.counters
    assert counters.steps == len(reply.blocks) > 0
    assert counters.drafted == sum(block.offered for block in reply.blocks)
    assert counters.accepted == sum(counters.per_position)
    assert 1 + counters.steps + counters.accepted in (11, 12)
    assert (reply.ended, reply.predicted, again.counters) == (False, 12, counters)
    first = reply.blocks[0]
    assert (first.position, first.anchor, len(first.tokens), first.offered) == (5, reply.token_ids[0], GAMMA, GAMMA)


@needs_engine
def test_a_drafter_that_aborts_the_engine_leaves_this_process_alive(files: tuple[Path, Path], tmp_path: Path):
    """Without a mask token the file loads, and the process ends at the first draft."""
    bad = write_drafter(tmp_path / "bad.gguf", drop=MASK)
    with (
        LlamaCppServer(settings((files[0], bad)), tmp_path / "log") as server,
        pytest.raises(ServiceError, match=r"did not answer /completion.*signal SIGABRT\); it said last:\n") as error,
    ):
        server.complete(PROMPT, 8)
    assert error.value.hint == f"whole log: {tmp_path / 'log'}"


@needs_engine
def test_a_file_that_does_not_load_is_an_error_with_the_engines_own_words(files: tuple[Path, Path], tmp_path: Path):
    bad = write_drafter(tmp_path / "bad.gguf", drop="blk.0.attn_q_norm.weight")
    with pytest.raises(
        ServiceError, match=r"(?s)it did not start \(its process ended with exit code 1\).*failed to load draft"
    ):
        LlamaCppServer(settings((files[0], bad), log_level=3), tmp_path / "log")


@needs_engine
def test_no_server_outlives_its_parent(files: tuple[Path, Path], tmp_path: Path):
    """A parent that is killed closes nothing; the server notices all the same."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from dspark.engines.llamacpp import LlamaCppServer, LlamaCppSettings\n"
        "server = LlamaCppServer(LlamaCppSettings(Path(sys.argv[1]), context=64), Path(sys.argv[2]))\n"
        "print(server._child.pid, flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-P", "-c", code, str(files[0]), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(child)


def test_a_process_that_does_not_stop_is_killed(files: tuple[Path, Path], tmp_path: Path, monkeypatch: Any):
    deaf = tmp_path / "deaf.py"
    deaf.write_text("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)\n")
    monkeypatch.setattr(llamacpp, "_CHILD", deaf)
    monkeypatch.setattr(llamacpp, "_STOP_SECONDS", 0.1)
    monkeypatch.setattr(llamacpp, "engine_version", lambda: "an engine")
    started: list[int] = []
    popen = subprocess.Popen

    def noted(*arguments: Any, **more: Any) -> Any:
        child = popen(*arguments, **more)
        started.append(child.pid)
        return child

    monkeypatch.setattr(llamacpp.subprocess, "Popen", noted)
    with pytest.raises(ServiceError, match=r"was not up after 0\.5 s"):
        LlamaCppServer(settings(files), tmp_path / "log", patience=0.5)
    assert not _alive(started[0])


def test_what_is_missing_is_named_before_anything_starts(files: tuple[Path, Path], tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(llamacpp, "engine_version", lambda: "an engine")
    with pytest.raises(PreflightError, match=r"none\.gguf: file not found"):
        LlamaCppServer(settings((files[0], tmp_path / "none.gguf")), tmp_path / "log")
    monkeypatch.undo()
    monkeypatch.setattr(llamacpp.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PreflightError, match="not installed") as error:
        engine_version()
    assert error.value.hint == "pip install 'dspark[llamacpp]'"


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.parametrize("address", ["foo", "", "127.0.0.1:8080", "http://[::1", "http://h:port", "file:///etc/passwd"])
def test_what_is_no_address_is_refused_at_once(address: str):
    with pytest.raises(SettingsError, match="is no address of a server"):
        llamacpp.LlamaCppClient(address)


@pytest.mark.parametrize("settings", [{}, None, {"n_ctx": "many"}])
def test_a_server_that_does_not_say_how_long_a_request_may_be_is_refused(settings: Any, monkeypatch: Any):
    client = llamacpp.LlamaCppClient("http://127.0.0.1:1")
    monkeypatch.setattr(client, "ask_object", lambda path, body=None: {"default_generation_settings": settings})
    with pytest.raises(ServiceError, match="how long a request may be"):
        client.complete([1], 4)
