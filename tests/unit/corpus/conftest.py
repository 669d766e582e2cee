from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.config.models import CorpusSettings, DomainSpec
from dspark.errors import DataError

CASES = Path(__file__).parents[2] / "data" / "prompts"


class ByteEncoder:
    """A tokenizer of bytes with ChatML: what the target's own is asked for, and nothing else."""

    control_tokens = frozenset({"<|im_start|>", "<|im_end|>", "<think>", "</think>", "  "})

    def encode_chat(self, messages):
        if messages[0]["content"] == "refuse me":
            raise DataError("the chat template refuses the messages")
        if messages[0]["content"] == "render me to nothing":
            return []
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return list(f"{text}<|im_start|>assistant\n".encode())

    def round_trips(self, text):
        return "\u2063" not in text  # as if the tokenizer dropped this character


@pytest.fixture(scope="session")
def encoder():
    return ByteEncoder()


@pytest.fixture
def cases():
    return CASES


@pytest.fixture
def make_domain(tmp_path):
    """Write rows (objects, or lines as bytes) to a file and describe it as a domain."""

    def make(name, rows):
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        return DomainSpec.model_validate({"name": name, "source": {"kind": "jsonl", "path": f"{name}.jsonl"}})

    return make


@pytest.fixture
def make_settings():
    def make(*domains, evaluation=(), **prompts):
        return CorpusSettings.model_validate(
            {
                "name": "corpus",
                "target": "target",
                "domains": domains,
                "evaluation_domains": evaluation,
                "prompts": prompts,
            }
        )

    return make
