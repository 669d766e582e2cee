"""Decode with a language model and its DSpark drafter on ONNX Runtime alone: no torch, no transformers, no dspark.

    python decode.py --drafter PACKAGE/engines/onnxruntime --target DIR --prompt "Why is the sky blue?"

README.md beside this file says where the two folders come from. Speculative decoding, greedy, one request:

1. The *anchor* is the last committed token. The target has read everything before it, not the anchor itself.
2. The drafter has seen *features* of every position that the target has read: the outputs of some of its layers. From
   these and the anchor it drafts a block of gamma tokens, all in one pass.
3. The target reads the anchor and the block in one pass, which costs little more than reading one token. Its logits
   after the anchor and the first j drafts say what it would have said there by itself.
4. Drafts are accepted from the left as long as they are what the target says. Its own next token follows them, so a
   step commits at least one token and at most gamma + 1. That token is the next anchor.
5. What both models remember of the anchor and of the accepted drafts stays; the rest was never said.

So the text is the target's own, whatever the drafter proposes; a good drafter only makes the steps fewer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnxruntime


class Model:
    """A graph, and the keys and values of the positions that it remembers: arrays [layers, 1, heads, positions, width].

    The graph is handed what is remembered and gives back what is new. To forget a position is not to store it.
    """

    def __init__(self, folder: Path, graph: str, threads: int) -> None:
        if not (folder / "io.json").is_file():
            refuse(f"{folder} holds no io.json")
        self.io = json.loads((folder / "io.json").read_text(encoding="utf-8"))
        if graph not in self.io:
            refuse(f"{folder} holds another kind of model: are --drafter and --target swapped?")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Two models take turns here: one that spins while it waits would take the cores from the other.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        file = str(folder / self.io[graph]["file"])
        self.session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self.begin()

    def begin(self) -> None:
        """Forget everything."""
        shape = (self.io["layers"], 1, self.io["num_key_value_heads"], 0, self.io["head_dim"])
        self.keys = self.values = np.zeros(shape, np.float32)

    def remembered(self) -> dict[str, Any]:
        """The inputs that both graphs have in common."""
        return {
            "past_keys": self.keys,
            "past_values": self.values,
            "past_length": np.array([self.keys.shape[3]], np.int64),
        }

    def remember(self, keys: Any, values: Any) -> None:
        """Store the keys and values of positions behind those that are remembered."""
        self.keys = np.concatenate([self.keys, keys], 3)
        self.values = np.concatenate([self.values, values], 3)


class Target(Model):
    """The language model."""

    def __init__(self, folder: Path, threads: int) -> None:
        super().__init__(folder, "graph", threads)

    def read(self, tokens: Sequence[int]) -> tuple[Any, Any]:
        """Read tokens behind the remembered ones: logits [tokens, vocabulary] and features [1, tokens, width]."""
        logits, features, self.new_keys, self.new_values = self.session.run(
            ["logits", "features", "new_keys", "new_values"],
            {"token_ids": np.array([tokens], np.int64), **self.remembered()},
        )
        return logits[0], features

    def keep(self, count: int) -> None:
        """Remember the first `count` of the tokens that were read last."""
        self.remember(self.new_keys[:, :, :, :count], self.new_values[:, :, :, :count])


class Drafter(Model):
    """The drafter."""

    def __init__(self, folder: Path, threads: int) -> None:
        super().__init__(folder, "cached", threads)
        # With a temperature above 0 the graph draws its tokens from this noise; 0 is greedy.
        self.silence = np.zeros((1, self.io["gamma"], self.io["draft_vocab_size"]), np.float32)

    def draft(self, features: Any, anchor: int) -> list[int]:
        """Take in the features of the positions that were committed since, and draft a block behind the anchor."""
        drafts, keys, values = self.session.run(
            ["draft_ids", "new_keys", "new_values"],
            {
                "features": features,
                "new_count": np.array([features.shape[1]], np.int64),
                "anchor_ids": np.array([anchor], np.int64),
                "temperature": np.zeros(1, np.float32),
                "noise": self.silence,
                **self.remembered(),
            },
        )
        self.remember(keys, values)
        return [int(token) for token in drafts[0]]


@dataclass
class Decoded:
    """What came out, and what it took."""

    tokens: list[int]
    steps: int  # passes of the target, that over the prompt not counted
    tau: float  # tokens committed per step, the target's own included
    tokens_per_second: float  # without the prompt and the token that it gave


def decode(target: Target, drafter: Drafter | None, prompt: Sequence[int], limit: int) -> Decoded:
    """Answer a prompt with up to `limit` tokens; without a drafter every step commits one."""
    ends = target.io["eos_token_ids"]
    target.begin()
    logits, features = target.read(prompt)
    target.keep(len(prompt))
    tokens = [int(logits[-1].argmax())]
    steps = committed_in_steps = 0
    if drafter is not None:
        drafter.begin()
    started = time.perf_counter()
    while tokens[-1] not in ends and len(tokens) < limit:
        drafts = [] if drafter is None else drafter.draft(features, tokens[-1])
        logits, features = target.read([tokens[-1], *drafts])
        said = [int(token) for token in logits.argmax(-1)]  # said[j]: behind the anchor and the first j drafts
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == said[accepted]:
            accepted += 1
        target.keep(accepted + 1)  # the anchor and the accepted drafts
        features = features[:, : accepted + 1]
        committed = said[: accepted + 1]  # the accepted drafts, which the target said too, and the token behind them
        for place, token in enumerate(committed):
            if token in ends:
                committed = committed[: place + 1]
                break
        steps += 1
        committed_in_steps += len(committed)
        tokens += committed
    seconds = time.perf_counter() - started
    tokens = tokens[:limit]
    tau = committed_in_steps / steps if steps else 1.0
    return Decoded(tokens, steps, tau, (len(tokens) - 1) / seconds if steps else 0.0)


def check_pair(target: dict[str, Any], drafter: dict[str, Any]) -> None:
    """A drafter reads one target's features and shares its vocabulary; another target's mean nothing to it."""
    for key in ("embedding_digest", "head_digest", "taps", "hidden_size", "vocab_size", "mask_token_id"):
        if target[key] != drafter[key]:
            refuse(f"the drafter belongs to another target: {key} differs in the two io.json")


def refuse(what: str) -> NoReturn:
    """End with exit code 2: nothing was decoded."""
    print(what, file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    """Decode one prompt, and on request the same without drafts."""
    arguments = read_arguments()
    target = Target(arguments.target, arguments.threads)
    drafter = Drafter(arguments.drafter, arguments.threads)
    check_pair(target.io, drafter.io)
    tokenizer, prompt = read_prompt(arguments, target.io)
    room = target.io["max_position"] - len(prompt) - drafter.io["gamma"]
    if not 1 <= arguments.new_tokens <= room:
        refuse(f"--new-tokens {arguments.new_tokens}: the target has room for 1 to {room} behind this prompt")

    ways: dict[str, Drafter | None] = {"with drafts": drafter}
    if arguments.plain:
        ways["plain"] = None
    for way in ways.values():
        decode(target, way, prompt, min(8, arguments.new_tokens))  # the first passes are slower than the others
    results: dict[str, list[Decoded]] = {name: [] for name in ways}
    for _ in range(max(arguments.rounds, 1)):
        for name, way in ways.items():
            results[name].append(decode(target, way, prompt, arguments.new_tokens))

    tokens = results["with drafts"][0].tokens
    if tokenizer is not None:
        print(tokenizer.decode(tokens))
    print("tokens", *tokens)
    for name, runs in results.items():
        speed = statistics.median(run.tokens_per_second for run in runs)
        took = f"{len(runs[0].tokens)} tokens, {runs[0].steps} steps, tau {runs[0].tau:.3f}"
        print(f"{name}: {took}, {speed:.1f} tokens/s (n={len(runs)})")
    if arguments.plain:
        equal = tokens == results["plain"][0].tokens
        print("both texts are equal" if equal else "THE TEXTS DIFFER")
        raise SystemExit(0 if equal else 1)


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Speculative decoding with ONNX Runtime alone.")
    parser.add_argument("--drafter", type=Path, required=True, help="engines/onnxruntime of a package")
    parser.add_argument("--target", type=Path, required=True, help="what `dspark targets export NAME --out DIR` wrote")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", help="a user's message; wrapped as the target's chat template would")
    given.add_argument("--ids", help="token ids of a whole prompt instead, separated by commas")
    parser.add_argument("--new-tokens", type=int, default=64, help="limit of the answer (default 64)")
    parser.add_argument("--plain", action="store_true", help="decode without drafts too, and compare")
    parser.add_argument("--rounds", type=int, default=1, help="time each way so often, in turn (default 1)")
    parser.add_argument("--threads", type=int, default=0, help="of each model (default: one per core)")
    return parser.parse_args()


def read_prompt(arguments: argparse.Namespace, io: dict[str, Any]) -> tuple[Any, list[int]]:
    """The tokenizer, if text was given, and the prompt's token ids."""
    if arguments.ids is not None:
        ids = [int(part) if part.strip().isdigit() else -1 for part in arguments.ids.split(",")]
        if not all(0 <= token < io["vocab_size"] for token in ids):
            refuse(f"--ids: give numbers from 0 to {io['vocab_size'] - 1}, separated by commas")
        return None, ids
    if "chat" not in io:
        refuse("this target's chat template is not two strings around a message: use --ids")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(arguments.target / io["tokenizer"]))
    # A message that spells a control token such as <|im_end|> is read as that token: a service must refuse it.
    text = io["chat"]["before"] + arguments.prompt.strip() + io["chat"]["after"]
    return tokenizer, tokenizer.encode(text, add_special_tokens=False).ids


if __name__ == "__main__":
    main()
