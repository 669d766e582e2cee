"""Clients of SGLang and vLLM against servers that speak their protocols; what they count, independently known."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # protocol_servers.py

from protocol_servers import Engine, PlainVLLMDouble, SGLangDouble, VLLMDouble, serving

from dspark.engines.client import file_name
from dspark.engines.connect import connect
from dspark.engines.counters import Counters, of_histogram
from dspark.engines.prometheus import Sample, parse_samples
from dspark.engines.replay import replay
from dspark.engines.sglang_client import SGLangClient
from dspark.engines.vllm_client import VLLMClient, of_totals
from dspark.errors import DataError, ServiceError
from dspark.evaluation.tiny import tiny_drafter, tiny_target

PROMPTS = [[3, 4, 5], [7, 7, 8, 9, 2, 13], [20]]
LIMIT = 24


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A target that repeats itself, so that a random drafter is right now and then."""
    target = tiny_target(24, spread=0.4, seed=3)
    return target, tiny_drafter(target, 4, seed=1)


DOUBLES = {
    "sglang": SGLangDouble,
    "sglang with windows": lambda engine: SGLangDouble(engine, windows=True),
    "vllm": VLLMDouble,
    "vllm with totals alone": lambda engine: VLLMDouble(engine, own=False),
    "vllm with totals of before": lambda engine: VLLMDouble(engine, own=False, before=[[4, 0, 1], [2]]),
}


@pytest.mark.parametrize("kind", DOUBLES)
def test_replies_and_counters_are_the_engines(pair: tuple[Any, Any], kind: str) -> None:
    engine = Engine(*pair)
    with serving(DOUBLES[kind](engine)) as address:
        client = connect(address)
        assert client.name == kind.split()[0]
        for prompt in PROMPTS:
            expected = engine.run(prompt, LIMIT)
            found = client.complete(prompt, LIMIT)
            assert found.token_ids == tuple(expected.token_ids) and not found.ended and not found.shortened
            accepted = expected.accepted
            assert (found.counters.steps, found.counters.accepted) == (len(accepted), sum(accepted))
            assert found.counters.drafted == 4 * len(accepted)
            assert sum(found.counters.per_position) == sum(accepted)
            assert found.counters.per_position[:1] == (sum(one > 0 for one in accepted),)[: bool(sum(accepted))]


@pytest.mark.parametrize("kind", DOUBLES)
@pytest.mark.parametrize("prompt", [PROMPTS[0], *(pytest.param(one, marks=pytest.mark.long) for one in PROMPTS[1:])])
def test_a_replay_counts_what_these_engines_count(pair: tuple[Any, Any], kind: str, prompt: list[int]) -> None:
    """To the end of the last block, at the limit as well as behind a token that ends the reply."""
    engine = Engine(*pair)
    text = engine.run(prompt, LIMIT).token_ids
    for place in (None, 1, 12):
        engine.eos_token_ids = frozenset() if place is None else frozenset([text[place]])
        with serving(DOUBLES[kind](engine)) as address:
            found = connect(address).complete(prompt, LIMIT)
        assert found.ended is (place is not None)
        assert not set(found.token_ids) & engine.eos_token_ids, "the token that ended it is read out"
        expected = replay(*pair, prompt, found.token_ids, LIMIT, ended=found.ended, cut=False)
        assert expected.counters == found.counters
        cut = replay(*pair, prompt, found.token_ids, LIMIT, ended=found.ended, cut=True)
        assert cut.counters.drafted <= expected.counters.drafted


def test_some_blocks_are_accepted_behind_the_limit(pair: tuple[Any, Any]) -> None:
    """Else the two ways of ending a reply could not be told apart above."""
    engine = Engine(*pair)
    differ = 0
    for prompt in PROMPTS:
        for limit in range(4, 24):
            reply = engine.run(prompt, limit)
            whole, cut = (
                replay(*pair, prompt, reply.token_ids, limit, ended=False, cut=cut).counters for cut in (False, True)
            )
            assert (whole.steps, whole.accepted) == (len(reply.accepted), sum(reply.accepted))
            differ += whole.accepted != cut.accepted
    assert differ > 3


@pytest.mark.parametrize("kind", ["sglang with windows", "vllm"])
def test_blocks_that_are_verified_in_part_are_told(pair: tuple[Any, Any], kind: str) -> None:
    engine = Engine(*pair)
    with serving(DOUBLES[kind](engine)) as address:
        client = connect(address)
        assert not client.complete(PROMPTS[0], LIMIT).shortened
        engine.verified = 2
        assert client.complete(PROMPTS[0], LIMIT).shortened


@pytest.mark.parametrize(
    ("counted", "gamma", "shortened"),
    [
        (Counters(5, 20, 3, (3,)), None, False),
        (Counters(5, 20, 3, (3,)), 4, False),
        (Counters(5, 19, 3, (3,)), None, True),  # blocks of different lengths
        (Counters(5, 15, 3, (3,)), 4, True),
        (Counters(), 4, False),
    ],
)
def test_totals_tell_blocks_that_are_no_whole_ones(counted: Counters, gamma: int | None, shortened: bool) -> None:
    assert of_totals(counted, gamma) == (counted, shortened)


@pytest.mark.parametrize("incremental", [False, True])
def test_sglang_streams_the_same_text(pair: tuple[Any, Any], incremental: bool) -> None:
    engine = Engine(*pair)
    text = engine.run(PROMPTS[1], LIMIT).token_ids
    with serving(SGLangDouble(engine, incremental=incremental)) as address:
        found = SGLangClient(address).stream(PROMPTS[1], LIMIT)
        assert list(found.token_ids) == text and len(found.seconds) == len(text)
        assert list(found.seconds) == sorted(found.seconds) and found.seconds[-1] <= found.whole_seconds
        engine.eos_token_ids = frozenset([text[5]])
        ended = SGLangClient(address).stream(PROMPTS[1], LIMIT)
        assert list(ended.token_ids) == text[: text.index(text[5])] and len(ended.seconds) == len(ended.token_ids)
        assert len(SGLangClient(address).stream(PROMPTS[1], LIMIT, endless=True).token_ids) == LIMIT


def test_vllm_streams_the_same_text(pair: tuple[Any, Any]) -> None:
    engine = Engine(*pair)
    text = engine.run(PROMPTS[1], LIMIT).token_ids
    with serving(VLLMDouble(engine)) as address:
        found = VLLMClient(address).stream(PROMPTS[1], LIMIT)
        assert list(found.token_ids) == text and list(found.seconds) == sorted(found.seconds)
        engine.eos_token_ids = frozenset([text[5]])
        ended = VLLMClient(address).stream(PROMPTS[1], LIMIT)
        assert list(ended.token_ids) == text[: text.index(text[5])] and len(ended.seconds) == len(ended.token_ids)
        assert len(VLLMClient(address).stream(PROMPTS[1], LIMIT, endless=True).token_ids) == LIMIT


def test_servers_say_what_they_are(pair: tuple[Any, Any]) -> None:
    engine = Engine(*pair)
    with serving(SGLangDouble(engine)) as address:
        served = SGLangClient(address).served()
        assert (served.engine, served.target, served.gamma) == ("SGLang 0.5.23", "tiny", 4)
    with serving(VLLMDouble(engine)) as address:
        served = VLLMClient(address).served()
        assert (served.engine, served.target, served.gamma) == ("vLLM 0.32.0", "tiny", None)


def test_a_server_that_speculates_otherwise_or_not_at_all_is_refused(pair: tuple[Any, Any]) -> None:
    engine = Engine(*pair)
    with serving(SGLangDouble(engine, speculative_algorithm="EAGLE3")) as address:
        with pytest.raises(ServiceError, match="speculates with 'EAGLE3', not DSPARK") as caught:
            SGLangClient(address).served()
        assert "--speculative-algorithm DSPARK" in str(caught.value.hint)
    with serving(PlainVLLMDouble(engine)) as address:
        client = VLLMClient(address)
        assert (client.complete([1], 4).counters, client.totals()) == (Counters(), None), (
            "plain decoding counts nothing"
        )
        with pytest.raises(ServiceError, match=r"/metrics lacks vllm:spec_decode_num_drafts"):
            client.counters()


def test_who_answers_otherwise_is_nobody_that_is_known(pair: tuple[Any, Any]) -> None:
    class Other:
        def get(self, path: str) -> Any:
            return "hello" if path == "/version" else None

    with serving(Other()) as address:
        with pytest.raises(ServiceError, match=r"no llama\.cpp, SGLang or vLLM") as caught:
            connect(address)
        assert "/props with 404" in caught.value.message and "something else than JSON" in caught.value.message
        with pytest.raises(ServiceError, match="vLLM at"):
            connect(address, "vllm")


def test_a_page_for_people_is_not_quoted() -> None:
    class Site:
        def get(self, path: str) -> Any:
            return 404, "<!DOCTYPE HTML>\n<html>File not found</html>"

    with serving(Site()) as address, pytest.raises(ServiceError) as caught:
        connect(address, "sglang")
    assert caught.value.message.endswith("it answered /server_info with 404")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"meta_info": None}, "no meta_info"),
        ({"output_ids": "text"}, "no output_ids"),
        ({"meta_info": {"finish_reason": {"type": "abort"}}}, "ended a reply with .*abort"),
    ],
)
def test_replies_of_sglang_that_say_too_little_are_refused(
    pair: tuple[Any, Any], damage: dict[str, Any], message: str
) -> None:
    double = SGLangDouble(Engine(*pair))
    double.answer = lambda *arguments: {"output_ids": [1], "meta_info": {}} | damage  # type: ignore[method-assign]
    with serving(double) as address, pytest.raises(ServiceError, match=message):
        SGLangClient(address).complete([1], 4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"choices": []}, "no choices"),
        ({"choices": [{"text": "a", "finish_reason": "stop"}]}, "no token_ids"),
        ({"choices": [{"token_ids": [1], "finish_reason": "error"}]}, "ended a reply with 'error'"),
    ],
)
def test_replies_of_vllm_that_say_too_little_are_refused(
    pair: tuple[Any, Any], damage: dict[str, Any], message: str
) -> None:
    double = VLLMDouble(Engine(*pair))
    double.answer = lambda reply: damage  # type: ignore[method-assign]
    with serving(double) as address, pytest.raises(ServiceError, match=message):
        VLLMClient(address).complete([1], 4)


def test_prompts_that_cannot_be_asked_are_refused(pair: tuple[Any, Any]) -> None:
    with serving(VLLMDouble(Engine(*pair))) as address, pytest.raises(DataError, match="do not fit into 500 positions"):
        VLLMClient(address).complete([1] * 480, 30)
    with pytest.raises(DataError, match="empty prompt"):
        SGLangClient("http://nowhere:1").complete([], 4)


def test_a_histogram_gives_the_counts_of_each_position() -> None:
    """Five steps: two without an accepted draft, one with one, two with three."""
    assert of_histogram([2, 1, 0, 2], 15) == Counters(5, 15, 7, (3, 2, 2))
    assert of_histogram([3, 0, 0], 6) == Counters(3, 6, 0, ())
    assert of_histogram([], 0) == Counters()


def test_prometheus_lines_are_read_with_their_labels() -> None:
    text = '# TYPE a counter\na_total{x="1",y="q\\"}"} 4.0\nb 1e3 1700000000\nnot a sample\nc{x="1"} nothing\n'
    assert list(parse_samples(text)) == [Sample("a_total", {"x": "1", "y": 'q\\"}'}, 4.0), Sample("b", {}, 1000.0)]


@pytest.mark.parametrize(
    ("path", "name"), [("/a/b/c.gguf", "c.gguf"), ("org/name/", "name"), (None, "unknown"), ("C:\\x\\y.gguf", "y.gguf")]
)
def test_where_a_model_lies_is_not_told(path: str | None, name: str) -> None:
    assert file_name(path) == name


def test_where_nobody_listens_that_is_said_once_and_not_for_every_engine(closed_address: str) -> None:
    with pytest.raises(ServiceError) as caught:
        connect(closed_address)
    assert caught.value.message == f"nothing answers at {closed_address}: Connection refused"
    assert "\n" not in caught.value.hint and caught.value.hint.startswith("start")
    with pytest.raises(ServiceError, match=f"SGLang at {closed_address}: it did not answer .*: Connection refused"):
        connect(closed_address, "sglang")


@pytest.fixture
def closed_address() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listening.getsockname()[1]}"
