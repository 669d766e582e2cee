"""Chat with a target and its drafter on a CPU, and see what the drafter saved.

    python examples/chat/chat.py                                             # after `make demo`
    python examples/chat/chat.py --package builds/tiny/package --say hello   # after `dspark run --target tiny`

At temperature 0 the text is what the target says without a drafter; the drafter only changes in how many passes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import dspark

if TYPE_CHECKING:
    from dspark.decoding.records import Decoded
    from dspark.targets.loading import Target


def main() -> None:
    """Answer message after message until the input ends."""
    arguments = read_arguments()
    package = dspark.load_package(arguments.workspace / arguments.package)
    name = package.manifest.inputs.target.name
    record = dspark.read_record(arguments.workspace / "targets" / f"{name}.json")
    target = dspark.load_target(record, arguments.workspace)
    proposer = package.proposer(target)  # refuses a target that the drafter was not trained on

    messages: list[dict[str, str]] = []
    for text in said(arguments.say):
        messages.append({"role": "user", "content": text})
        prompt = target.template.encode_chat(messages)
        [reply] = dspark.decode(
            target,
            proposer,
            [prompt],
            max_new_tokens=arguments.new_tokens,
            temperature=arguments.temperature,
            seeds=[len(messages)],
        )
        answer = target.tokenizer.decode(reply.token_ids, skip_special_tokens=True)
        print(in_steps(target, reply) if arguments.steps else answer)
        print(f"  {saved(reply)}", file=sys.stderr)
        messages.append({"role": "assistant", "content": answer})


def said(messages: list[str]) -> Iterator[str]:
    """The messages of the command line, or what is typed."""
    if messages:
        yield from messages
        return
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            return
        if text:
            yield text


def in_steps(target: Target, reply: Decoded) -> str:
    """The text with a bar between the steps: behind the first token, what one pass of the target committed."""
    pieces, begin = [reply.token_ids[:1]], 1
    for count in reply.emitted.tolist():
        pieces.append(reply.token_ids[begin : begin + count])
        begin += count
    return "|".join(target.tokenizer.decode(piece, skip_special_tokens=True) for piece in pieces)


def saved(reply: Decoded) -> str:
    """How many passes of the target the answer took, and how long."""
    tokens, steps = len(reply.token_ids), len(reply.cycles)
    if not steps:
        return f"{tokens} token, from the prompt's own pass"
    seconds = float(reply.cycle_seconds.sum())
    tau = float(reply.cycles.committed.mean())
    return f"{tokens} tokens in {steps} steps, tau {tau:.2f}, {(tokens - 1) / seconds:.1f} tokens/s"


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Chat with a target and its drafter on a CPU.")
    parser.add_argument("--workspace", type=Path, default=Path(), help="where `dspark run` was called (default: here)")
    parser.add_argument("--package", type=Path, default=Path("builds/smollm2-135m/package"), help="in the workspace")
    parser.add_argument("--say", action="append", default=[], help="a message; may be repeated (default: ask)")
    parser.add_argument("--new-tokens", type=int, default=128, help="limit of an answer (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    parser.add_argument("--steps", action="store_true", help="show where one step ends and the next begins")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except dspark.DsparkError as error:
        print(f"{error.message}\n  {error.hint}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
