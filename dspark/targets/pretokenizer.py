"""How byte-level BPE cuts text into words before merging: llama.cpp's names for the rules, and tokenizer.json's words.

A GGUF file says only the name; a tokenizer that cuts otherwise than the one a model was trained with yields ids that
the model has never seen in a row.
"""

from __future__ import annotations

from typing import Any

Step = dict[str, Any]

_WORDS: Step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES: Step = {**_WORDS, "use_regex": False}
_DIGITS: Step = {"type": "Digits", "individual_digits": True}
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(regex: str) -> Step:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


# llama.cpp's value of tokenizer.ggml.pre: the steps of tokenizer.json.
RULES: dict[str, tuple[Step, ...]] = {
    "gpt-2": (_WORDS,),
    "smollm": (_DIGITS, _WORDS),
    "qwen2": (_split(_CONTRACTIONS + r"\p{N}" + _REST), _BYTES),
    "llama-bpe": (_split(_CONTRACTIONS + r"\p{N}{1,3}" + _REST), _BYTES),
}


def pre_tokenizer(rule: str) -> Step:
    """The `pre_tokenizer` of tokenizer.json for a rule of `RULES`.

    Raises:
        KeyError: none of them.
    """
    steps = RULES[rule]
    return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": list(steps)}


def rule_of(described: Step | None) -> str | None:
    """The name of what tokenizer.json describes; None: llama.cpp is not known to have that rule."""
    described = described or {}
    steps = tuple(_telling(step) for step in described.get("pretokenizers") or [described])
    return next((name for name, rule in RULES.items() if tuple(map(_telling, rule)) == steps), None)


def only_bytes(described: Step | None) -> bool:
    """Whether text is cut nowhere: every byte is a word's letter, and nothing else happens."""
    return _telling(described or {}) == _telling(_BYTES)


def _telling(step: Step) -> Step:
    """A step without what does not change where it cuts, defaults spelled out."""
    defaults = {"add_prefix_space": True, "use_regex": True} if step.get("type") == "ByteLevel" else {}
    return {**defaults, **{key: value for key, value in step.items() if key != "trim_offsets"}}
