"""Scrapes of the three engines, and what lies between two of them."""

from __future__ import annotations

import pytest

from dspark.engines.scrape import base_of, between, parse_scrape, read_metrics
from dspark.errors import DataError

# Of a real server, after one reply of 37 tokens.
LLAMACPP = """\
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 10
llamacpp:tokens_predicted_total 37
llamacpp:n_decode_total 34
llamacpp:n_tokens_max 49
llamacpp:spec_decode_num_draft_tokens_total 131
llamacpp:spec_decode_num_accepted_tokens_total 3
llamacpp:spec_decode_num_drafts_total 33
llamacpp:requests_processing 0
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 3
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 0
"""


def vllm(steps=100, accepted=(60, 30, 10), *, created=1.78e9, engine="0", requests=5, total="_total", scale=1):
    """vLLM 0.32.0's text (engine-formats.md, 2.4)."""
    name, labels = "vllm:spec_decode_num_", f'engine="{engine}",model_name="tiny"'
    lines = [
        f"{name}drafts{total}{{{labels}}} {steps * scale:.1f}",
        f"{name}drafts_created{{{labels}}} {created}",
        f"{name}draft_tokens{total}{{{labels}}} {3.0 * steps * scale}",
        f"{name}accepted_tokens{total}{{{labels}}} {sum(accepted) * scale:.1f}",
        *(
            f'{name}accepted_tokens_per_pos{total}{{{labels},position="{place}"}} {count * scale:.1f}'
            for place, count in enumerate(accepted)
        ),
        f"vllm:generation_tokens{total}{{{labels}}} {(steps + sum(accepted) + requests) * scale:.1f}",
        f'vllm:request_success{total}{{{labels},finished_reason="stop"}} {requests * scale:.1f}',
        f'vllm:request_success{total}{{{labels},finished_reason="length"}} 0.0',
    ]
    return "\n".join(lines) + "\n"


def sglang(steps=100, tokens=205, requests=5, window=0.0):
    """SGLang 0.5.23's text: counted when a request ends, apart for streamed ones (engine-formats.md, 1.9)."""
    return (
        f'sglang:spec_verify_calls_total{{model_name="m"}} {steps:.1f}\n'
        f'sglang:generation_tokens_total{{model_name="m",is_streaming="true"}} {tokens - 50:.1f}\n'
        'sglang:generation_tokens_total{model_name="m",is_streaming="false"} 50.0\n'
        f'sglang:num_requests_total{{model_name="m",is_streaming="true"}} {requests:.1f}\n'
        'sglang:spec_accept_length{model_name="m"} 2.0\n'
        f'sglang:spec_cap_length{{model_name="m"}} {window}\n'
    )


def test_llamacpp_says_everything_but_requests():
    """37 tokens, 33 steps, 3 accepted: the first token is of no step, so that one request or two have ended."""
    found = parse_scrape(LLAMACPP, "x")
    assert (found.engine, found.steps, found.accepted, found.drafted) == ("llamacpp", 33, 3, 131)
    assert (found.per_position, found.tokens, found.ended, found.requests) == ((3,), 37, None, 1)


def test_requests_of_llamacpp_are_at_least_as_many_as_its_longest_sequence_allows():
    """Replies that end inside a block hold fewer tokens than were accepted: 490 tokens are ten requests of 49."""
    text = LLAMACPP.replace("predicted_total 37", "predicted_total 490").replace("drafts_total 33", "drafts_total 487")
    assert parse_scrape(text, "x").requests == 10
    off = LLAMACPP.replace("drafts_total 33", "drafts_total 0")
    assert parse_scrape(off, "x").requests == 1  # without drafts all tokens are of no step, and tell nothing


@pytest.mark.parametrize("total", ["_total", ""])
def test_vllm_counts_over_all_its_engines(total):
    found = parse_scrape(vllm(total=total) + vllm(engine="1", steps=50, total=total), "x")
    assert (found.engine, found.steps, found.accepted, found.drafted) == ("vllm", 150, 200, 450)
    assert (found.per_position, found.requests, found.cut_replies) == ((120, 60, 20), 10, 0)


def test_sglang_counts_follow_from_tokens_and_requests():
    """205 tokens of 5 requests: 200 came with 100 steps, so that 100 drafts were accepted, and more at the ends."""
    found = parse_scrape(sglang(window=2.5), "x")
    assert (found.engine, found.steps, found.accepted, found.drafted) == ("sglang", 100, 100, None)
    assert (found.per_position, found.requests, found.cut_replies, found.window) == (None, 5, 5, 2.5)
    assert parse_scrape(sglang(), "x").window is None


def test_a_server_without_a_drafter_has_no_steps():
    found = parse_scrape("vllm:generation_tokens_total 70.0\n", "x")
    assert (found.steps, found.tokens) == (0, 70)


@pytest.mark.parametrize("text", ["", "node_load1 0.5\n", "<html>no</html>", "vllm:x 1\nsglang:y 1\n"])
def test_what_is_of_no_engine_or_of_two_is_refused(text):
    with pytest.raises(DataError, match=r"^here: (no metrics of|metrics of sglang and vllm)"):
        parse_scrape(text, "here")


def test_numbers_that_are_none_are_passed_over():
    text = vllm().replace("drafts_total", "other_total") + (
        'vllm:spec_decode_num_drafts_total NaN\nvllm:spec_decode_num_accepted_tokens_per_pos_total{position="x"} 4\n'
    )
    assert parse_scrape(text, "x").steps == 0


@pytest.mark.parametrize(
    ("earlier", "later"), [(vllm(), vllm(scale=3)), (sglang(), sglang(300, 615, 15)), (LLAMACPP, LLAMACPP)]
)
def test_what_lies_between_two_scrapes_is_their_difference(earlier, later):
    before, after = parse_scrape(earlier, "a"), parse_scrape(later, "b")
    found, restarted = between(before, after)
    assert not restarted
    for name in ("steps", "accepted", "tokens", "cut_replies"):
        assert getattr(found, name) == getattr(after, name) - getattr(before, name)
    if before.engine == "vllm":
        assert (found.per_position, found.drafted, found.ended) == ((120, 60, 20), 600, 10)


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (vllm(scale=3), vllm()),
        (vllm(), vllm(scale=3, created=1.79e9)),  # it has more by now than before, but began again
        (vllm(accepted=(60, 30, 10)), vllm(steps=200, accepted=(90, 29, 1))),
        (sglang(300, 615, 15), sglang()),
        (LLAMACPP.replace(" 33", " 34"), LLAMACPP),
    ],
)
def test_a_restart_between_two_scrapes_is_seen(earlier, later):
    found, restarted = between(parse_scrape(earlier, "a"), parse_scrape(later, "b"))
    assert restarted and found == parse_scrape(later, "b")


def test_scrapes_of_two_engines_are_no_window():
    with pytest.raises(DataError, match="earlier scrape is of vllm, the later one of sglang"):
        between(parse_scrape(vllm(), "a"), parse_scrape(sglang(), "b"))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="gone: cannot be read"):
        read_metrics(tmp_path / "gone")
    assert base_of("http://h:1/metrics/") == base_of("http://h:1") == "http://h:1"
