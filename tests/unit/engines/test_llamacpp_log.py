"""Counters and draft tokens, parsed from what llama.cpp b11549 printed (lines recorded from the engine)."""

from __future__ import annotations

import pytest

from dspark.engines.client import DraftedBlock
from dspark.engines.counters import Counters
from dspark.engines.llamacpp_log import Drafting, parse_blocks, parse_drafting, parse_metrics
from dspark.errors import ServiceError

METRICS = """\
# HELP llamacpp:tokens_predicted_total Number of generation tokens processed
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 24
llamacpp:prompt_seconds_total 0.82376
# HELP llamacpp:spec_decode_num_draft_tokens_total Speculative: Total draft tokens generated
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total 26
llamacpp:spec_decode_num_accepted_tokens_total 15
llamacpp:spec_decode_num_drafts_total 7
# HELP llamacpp:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position
# TYPE llamacpp:spec_decode_num_accepted_tokens_per_pos_total counter
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 6
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 5
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 2
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="3"} 2
"""

# The third candidate of the first slot below is a line feed, which the log prints as it is.
LOG = """\
0.03.797.601 D slot get_n_draft_: id  0 | task 0 | max possible draft: 5
0.03.640.036 D  - seq_id 0, draft candidate   0, pos   0:    260 (   0.827) ' the'
0.03.640.050 D  - seq_id 0, draft candidate   1, pos   0:    216 (   0.036) ' '
0.03.838.204 D  - seq_id 0, draft candidate   2, pos   0:    198 (   0.113) '
'
0.03.640.080 D  - seq_id 0, draft candidate   0, pos   1:   3547 (   0.230) ' speed'
0.03.640.123 D  - seq_id 0, draft candidate   0, pos   2:    282 (   0.958) ' of'
0.03.640.166 D spec common_specu: called impl draft-dspark, hist size = 85, call_count = 6, gen = 4
0.03.640.229 D slot handle_last_: id  0 | task 0 | generate_draft: id=3547, #tokens=85, #draft=3, pos_next=85
0.03.797.404 D slot   operator(): id  0 | task 0 | add accepted tokens: sampled=9741, ids.size=3, n_draft=3
0.03.797.482 D slot   operator(): id  0 | task 0 | accepted 2/3 draft tokens, new n_tokens = 88
0.03.797.601 D slot get_n_draft_: id  0 | task 0 | max possible draft: 2
0.03.838.128 D  - seq_id 0, draft candidate   0, pos   0:     30 (   0.378) '.'
0.03.838.221 D  - seq_id 0, draft candidate   0, pos   1:    198 (   0.568) '
'
0.03.838.264 D  - seq_id 0, draft candidate   0, pos   2:    198 (   0.783) '
'
0.03.838.349 D spec common_specu: truncating draft to 2 tokens
0.03.840.034 D slot handle_last_: id  0 | task 0 | generate_draft: id=9741, #tokens=88, #draft=2, pos_next=88
0.03.972.388 D slot handle_last_: id  0 | task 0 | slot decode token, id=378, n_ctx = 512, n_tokens = 90, truncated = 0
0.04.036.265 I slot      release: id  0 | task 0 | stop processing: n_tokens = 91, truncated = 0
"""


def test_counters_are_read_from_the_metrics():
    """15 accepted of 26 in 7 steps: 1 + 15 / 7 tokens each, which the engine's own log gave as 3.14."""
    counters = parse_metrics(METRICS)
    assert counters == Counters(steps=7, drafted=26, accepted=15, per_position=(6, 5, 2, 2))
    assert counters.tau == pytest.approx(3.14, abs=0.005) and Counters().tau is None


def test_a_difference_is_what_happened_in_between():
    later = Counters(steps=10, drafted=38, accepted=18, per_position=(8, 6, 2, 2))
    assert later - parse_metrics(METRICS) == Counters(3, 12, 3, (2, 1))  # positions without a change are left out
    # A position that nothing was accepted at before is not in the earlier metrics.
    assert Counters(2, 8, 3, (2, 1)) - Counters(1, 4, 1, (1,)) == Counters(1, 4, 2, (1, 1))


def test_metrics_without_counters_are_refused():
    without = "\n".join(line for line in METRICS.splitlines() if "num_drafts_total" not in line)
    with pytest.raises(ServiceError, match="lacks llamacpp:spec_decode_num_drafts_total"):
        parse_metrics(without)


def test_blocks_are_the_best_candidates_before_the_cut():
    assert parse_blocks(LOG.splitlines()) == [
        DraftedBlock(slot=0, position=85, anchor=3547, tokens=(260, 3547, 282), offered=3),
        DraftedBlock(slot=0, position=88, anchor=9741, tokens=(30, 198, 198), offered=2),
    ]


def test_text_that_looks_like_the_log_is_not_taken_for_it():
    """A reply is printed too; a line of it lacks time and level."""
    said = LOG.replace("' speed'", "'\n - seq_id 0, draft candidate   0, pos   1:      1 (   1.000) ''")
    assert parse_blocks(said.splitlines()) == parse_blocks(LOG.splitlines())


def test_a_log_without_candidates_is_refused():
    lower = [line for line in LOG.splitlines() if "draft candidate" not in line]
    with pytest.raises(ServiceError, match="shows 0 candidates of a block of which 3 were offered"):
        parse_blocks(lower)


# A line of the released engine at log level 4.
STATISTICS = (
    "0.01.188.467 T spec       dspark: statistics           dspark: #calls(b,g,a) =    2     {calls}     14, "
    "#gen drafts =     15, #acc drafts =     4, #gen tokens =     39, #acc tokens =     5, "
    "dur(b,g,a) = 0.001, {draft}, 0.003 ms"
)


def test_the_time_spent_on_drafting_is_the_last_total_of_the_log():
    lines = [STATISTICS.format(calls=7, draft="1.500"), "something else", STATISTICS.format(calls=15, draft="4.250")]
    assert parse_drafting(lines) == Drafting(15, pytest.approx(0.00425))
    assert parse_drafting(lines) - parse_drafting(lines[:1]) == Drafting(8, pytest.approx(0.00275))
    assert parse_drafting(["nothing was drafted"]) == Drafting()
