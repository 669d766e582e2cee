"""Certifying a server: against one that counts as the loop does, and ones that don't. No engine is needed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))  # protocol_servers.py

from protocol_servers import Engine, SGLangDouble, VLLMDouble, serving

from dspark.engines.client import Completion
from dspark.engines.connect import connect
from dspark.engines.counters import Counters
from dspark.engines.llamacpp import LlamaCppClient
from dspark.engines.llamacpp_loop import expected_request
from dspark.engines.replay import replay
from dspark.errors import DataError, ServiceError
from dspark.evaluation.server import certify_server
from dspark.evaluation.tiny import tiny_drafter, tiny_target

PROMPTS = [[3, 4, 5], [7, 7, 8, 9, 2, 30], [20], [11, 12, 13, 14], [9, 9], [2, 5, 2, 5]]
LIMIT = 24


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    target = tiny_target(40, spread=0.4, seed=3)
    return target, tiny_drafter(target, 4, seed=1)


class Server(LlamaCppClient):
    """Answers as the loop says that llama.cpp does, with `drafter` in it."""

    def __init__(self, target: Any, drafter: Any, n_max: int = 4) -> None:
        super().__init__("http://nowhere:1/")
        self.target, self.drafter, self.n_max = target, drafter, n_max

    def properties(self) -> dict[str, Any]:
        return {"build_info": "b1", "model_path": "/models/t.gguf", "default_generation_settings": {"n_ctx": 99}}

    def complete(self, prompt: Any, max_new_tokens: int) -> Completion:
        said = expected_request(self.target, self.drafter, prompt, max_new_tokens).token_ids
        done = replay(self.target, self.drafter, prompt, said, max_new_tokens, ended=False, n_max=self.n_max)
        return Completion(said, False, len(said), 0.5, done.counters)


def certify(server: Any, pair: tuple[Any, Any], **changes: Any) -> Any:
    fields = {"drafter_file": Path("d.gguf"), "drafter_sha256": "0" * 64, "max_new_tokens": LIMIT}
    return certify_server(server, *pair, PROMPTS, **(fields | changes))


@pytest.mark.parametrize("n_max", [1, 2, 4])
def test_a_server_that_does_what_the_loop_does_agrees_to_the_counter(pair: tuple[Any, Any], n_max: int) -> None:
    found = certify(Server(*pair, n_max=n_max), pair)
    assert (found.tau.result, found.tau.relative_difference.value) == ("agrees", 0.0)
    assert (found.verdict, found.reason) == ("agrees", None)
    assert found.tau.equal_counters == found.prompts == len(PROMPTS)
    assert (found.n_max, found.gamma, found.served_target) == (n_max, 4, "t.gguf")
    assert all(one.engine == one.offline for one in found.accepted_by_position)
    assert found.tokens_per_second.value == pytest.approx(LIMIT / 0.5)


def test_no_fewer_drafts_are_taken_for_verified_than_the_server_accepts(pair: tuple[Any, Any]) -> None:
    """One draft a block explains what was drafted, but drafts were accepted at the third place."""

    class Odd(Server):
        def complete(self, prompt: Any, max_new_tokens: int) -> Completion:
            reply = super().complete(prompt, max_new_tokens)
            return replace(reply, counters=replace(reply.counters, per_position=(2, 1, 1)))

    assert certify(Odd(*pair, n_max=1), pair).n_max == 3


def test_a_server_that_accepts_less_disagrees(pair: tuple[Any, Any]) -> None:
    """Every accepted token beyond the first of a block is lost: tau falls, with it every position but one."""

    class Lossy(Server):
        def complete(self, prompt: Any, max_new_tokens: int) -> Completion:
            reply = super().complete(prompt, max_new_tokens)
            steps, accepted = reply.counters.steps, reply.counters.accepted
            return replace(reply, counters=Counters(steps + accepted, reply.counters.drafted + accepted, 0, ()))

    found = certify(Lossy(*pair), pair)
    assert found.tau.engine_tau.value == 1.0
    assert found.tau.result == found.verdict == "disagrees" and found.tau.relative_difference.ci95[1] < 0
    assert "tau is 1.000 in the engine" in found.reason


def test_equal_means_of_unequal_prompts_disagree(pair: tuple[Any, Any]) -> None:
    """One token accepted more in half of the prompts, one fewer in the others: what shifted taps look like."""

    class Shuffled(Server):
        asked = 0

        def complete(self, prompt: Any, max_new_tokens: int) -> Completion:
            reply = super().complete(prompt, max_new_tokens)
            self.asked += 1
            change = 1 if self.asked % 2 else -1
            old = reply.counters
            return replace(reply, counters=replace(old, accepted=old.accepted + change))

    found = certify(Shuffled(*pair), pair)
    assert found.tau.result == "agrees" and found.tau.equal_counters == 0
    assert found.verdict == "disagrees" and "only 0 of 6 prompts" in found.reason


def test_a_server_without_drafts_and_one_with_other_traffic_are_refused(pair: tuple[Any, Any]) -> None:
    class Plain(Server):
        def complete(self, prompt: Any, max_new_tokens: int) -> Completion:
            return replace(super().complete(prompt, max_new_tokens), counters=Counters())

    class Busy(Server):
        def complete(self, prompt: Any, max_new_tokens: int) -> Completion:
            return replace(super().complete(prompt, max_new_tokens), counters=Counters(90, 300, 10, (10,)))

    with pytest.raises(ServiceError, match="drafted nothing for 6 prompts"):
        certify(Plain(*pair), pair)
    with pytest.raises(ServiceError, match="counted 100 tokens for a reply of 24: others use it"):
        certify(Busy(*pair), pair)
    with pytest.raises(DataError, match="no prompts"):
        certify_server(Server(*pair), *pair, [], drafter_file=Path("d"), drafter_sha256="")


def test_prompts_that_are_too_long_are_left_out_and_counted(pair: tuple[Any, Any]) -> None:
    """99 positions and replies of 24 leave room for prompts of 75 tokens; the target itself has 128 positions."""
    fields = {"drafter_file": Path("d.gguf"), "drafter_sha256": "0" * 64, "max_new_tokens": LIMIT}
    fits, too_long = [3] * 75, [3] * 76
    found = certify_server(Server(*pair), *pair, [*PROMPTS, too_long, fits], **fields)
    assert (found.prompts, found.left_out, found.verdict) == (len(PROMPTS) + 1, 1, "agrees")
    nine = [*[*PROMPTS, *PROMPTS][:8], too_long]
    found = certify_server(Server(*pair), *pair, nine, **fields)
    assert found.prompts + found.left_out == len(nine)
    with pytest.raises(DataError, match="2 of 3 prompts do not fit with a reply of 24 tokens into 99 positions, 1 are"):
        certify_server(Server(*pair), *pair, [PROMPTS[0], too_long, too_long], **fields)
    with pytest.raises(DataError, match="2 of 2 prompts"):
        certify_server(Server(*pair), *pair, [too_long, too_long], **fields)


@pytest.mark.parametrize("double", [SGLangDouble, VLLMDouble, lambda engine: VLLMDouble(engine, own=False)])
def test_sglang_and_vllm_are_certified_by_their_own_protocols(pair: tuple[Any, Any], double: Any) -> None:
    with serving(double(Engine(*pair, eos_token_ids=frozenset([5, 17])))) as address:
        found = certify(connect(address), pair)
    assert (found.verdict, found.reason, found.tau.relative_difference.value) == ("agrees", None, 0.0)
    assert found.tau.equal_counters == found.prompts == len(PROMPTS)
    assert (found.n_max, found.gamma, found.shortened, found.served_target) == (4, 4, 0, "tiny")


@pytest.mark.parametrize("double", [SGLangDouble, VLLMDouble])
def test_another_drafter_in_the_server_is_found_out(pair: tuple[Any, Any], double: Any) -> None:
    target, _ = pair
    with serving(double(Engine(target, tiny_drafter(target, 4, seed=9)))) as address:
        found = certify(connect(address), pair)
    assert found.verdict == "disagrees" and found.tau.equal_counters < len(PROMPTS)


@pytest.mark.parametrize("double", [lambda engine: SGLangDouble(engine, windows=True), VLLMDouble])
def test_a_server_that_schedules_cannot_be_compared_with_whole_blocks(pair: tuple[Any, Any], double: Any) -> None:
    with serving(double(Engine(*pair, verified=2))) as address:
        found = certify(connect(address), pair)
    assert (found.verdict, found.shortened) == ("inconclusive", len(PROMPTS))
    assert "late positions are lower" in found.reason


def test_another_block_size_is_said_before_anything_is_compared(pair: tuple[Any, Any]) -> None:
    target, _ = pair
    message = r"SGLang 0\.5\.23 .* drafts blocks of 3, d\.gguf has gamma 4"
    double = SGLangDouble(Engine(target, tiny_drafter(target, 3, seed=1)))
    with serving(double) as address, pytest.raises(DataError, match=message):
        certify(connect(address), pair)


def test_a_server_that_is_not_there_says_how_to_start_it(pair: tuple[Any, Any]) -> None:
    with pytest.raises(ServiceError, match="did not answer /props") as caught:
        LlamaCppClient("http://127.0.0.1:9", patience=2).properties()
    assert "--metrics" in str(caught.value.hint)
