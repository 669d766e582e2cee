from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dspark.decoding.history import History, Timing
from dspark.decoding.records import Decoded, RecordSet, calibration_records, label_of, read_records, write_records
from dspark.errors import DataError

EOS = frozenset({1})
TIMING = Timing(0.01, 0.04, 3)


def history(limit: int = 20, gamma: int = 3, temperature: float = 0.0) -> History:
    return History(5, gamma, limit, EOS, temperature, "fixed")


def add(one: History, drafts: list[int], verified: int, accepted: int, following: int) -> None:
    one.add(drafts, verified, accepted, following, np.arange(len(drafts), dtype=np.float32), TIMING)


def only_cycle(one: Decoded) -> tuple[int, int, int, int]:
    cycles = one.cycles
    assert len(cycles) == 1
    return int(cycles.accepted[0]), int(cycles.committed[0]), int(cycles.known[0]), int(one.emitted[0])


def test_a_rejection_commits_the_accepted_tokens_and_the_one_after():
    one = history(limit=4)
    one.begin(7, 0.5)
    add(one, [8, 9, 10], 3, 2, 11)
    done = one.result()
    assert done.token_ids == [7, 8, 9, 11]
    assert done.finish_reason == "length"
    assert done.prefill_seconds == 0.5
    assert only_cycle(done) == (2, 3, 3, 3)


def test_an_end_of_sequence_among_the_accepted_drafts_ends_the_text_and_censors_the_rest():
    """Accepted 8, eos, 10 and a bonus: what stands after the eos is not text, so nothing is known about it."""
    one = history()
    one.begin(7, 0.0)
    add(one, [8, 1, 10], 3, 3, 11)
    done = one.result()
    assert done.token_ids == [7, 8, 1]
    assert done.finish_reason == "stop"
    assert only_cycle(done) == (2, 2, 2, 2)
    assert done.cycles.valid.tolist() == [[True, True, False]]
    assert done.cycles.survived.tolist() == [[True, True, False]]


def test_an_end_of_sequence_after_the_drafts_leaves_their_outcomes_known():
    one = history()
    one.begin(7, 0.0)
    add(one, [8, 9, 10], 3, 1, 1)
    assert one.result().token_ids == [7, 8, 1]
    assert only_cycle(one.result()) == (1, 2, 3, 2)


def test_a_rejected_end_of_sequence_ends_nothing_but_hides_what_was_drafted_behind_it():
    """Behind an accepted end nothing is known; behind a rejected one all is rejected, whatever the drafts are worth."""
    one = history(limit=4)
    one.begin(7, 0.0)
    add(one, [8, 1, 10], 3, 1, 9)
    assert one.finish_reason is None
    add(one, [8, 9, 10], 3, 0, 12)
    assert (one.result().token_ids, one.result().finish_reason) == ([7, 8, 9, 12], "length")
    assert one.result().cycles.known.tolist() == [2, 1]
    assert one.result().cycles.accepted.tolist() == [1, 0]


def test_an_end_that_was_drafted_but_not_verified_hides_nothing():
    one = history()
    one.begin(7, 0.0)
    add(one, [8, 9, 1], 2, 2, 1)
    assert only_cycle(one.result()) == (2, 3, 2, 3)


def test_the_length_limit_cuts_the_text_but_not_what_the_cycle_committed():
    """Two tokens are left: of 8, 9, 10 and the bonus 11 two are emitted, and positions beyond them are censored."""
    one = history(limit=3)
    one.begin(7, 0.0)
    add(one, [8, 9, 10], 3, 3, 11)
    done = one.result()
    assert (done.token_ids, done.finish_reason) == ([7, 8, 9], "length")
    assert only_cycle(done) == (3, 4, 2, 2)


def test_an_end_of_sequence_beyond_the_limit_is_not_reached():
    one = history(limit=2)
    one.begin(7, 0.0)
    add(one, [8, 1, 10], 3, 2, 11)
    assert (one.result().token_ids, one.result().finish_reason) == ([7, 8], "length")


def test_an_end_of_sequence_on_the_last_token_allowed_is_a_stop():
    one = history(limit=2)
    one.begin(7, 0.0)
    add(one, [1, 9, 10], 3, 1, 11)
    assert (one.result().token_ids, one.result().finish_reason) == ([7, 1], "stop")


@pytest.mark.parametrize(("token", "limit", "reason"), [(1, 9, "stop"), (7, 1, "length")])
def test_the_first_token_can_be_the_last(token: int, limit: int, reason: str):
    one = history(limit=limit)
    one.begin(token, 0.0)
    done = one.result()
    assert (done.token_ids, done.finish_reason, len(done.cycles)) == ([token], reason, 0)
    assert done.emitted.tolist() == []
    assert done.cycles.valid.shape == (0, 3)


def test_positions_that_were_not_verified_are_unknown():
    """A rejection at position 1 would be known to end position 2, too; but whether 2 is looked at depends on the
    confidences, so counting it when it fails and not when it passes would bias what is fitted on it."""
    one = history(limit=9)
    one.begin(7, 0.0)
    add(one, [8, 9, 10], 1, 0, 1)
    assert one.result().cycles.valid.tolist() == [[True, False, False]]


def test_an_unfinished_request_has_no_result():
    one = history()
    one.begin(7, 0.0)
    with pytest.raises(RuntimeError, match="not finished"):
        one.result()


def decoded(temperature: float = 0.0, gamma: int = 3) -> Decoded:
    one = history(limit=6, gamma=gamma, temperature=temperature)
    one.begin(7, 0.25)
    add(one, [8, 9, 10][:gamma], gamma, min(1, gamma), 11)
    add(one, [12, 13, 14][:gamma], gamma, 0, 15)
    add(one, [1, 13, 14][:gamma], gamma, gamma and 1, 16)
    while one.finish_reason is None:
        add(one, [20, 21, 22][:gamma], gamma, 0, 23)
    return one.result()


def test_records_survive_writing_and_reading(tmp_path: Path):
    path = tmp_path / "records" / "temperature-1.safetensors"
    first, second = decoded(1.0), history(temperature=1.0)
    second.begin(1, 0.5)
    records = RecordSet(("a", "ä"), ("math", "chat"), (first, second.result()))
    write_records(path, records)
    again = read_records(path)
    assert (again.ids, again.domains, again.temperature, again.label) == (("a", "ä"), ("math", "chat"), 1.0, "sampled")
    for before, after in zip(records.decoded, again.decoded, strict=True):
        assert (before.token_ids, before.finish_reason) == (after.token_ids, after.finish_reason)
        assert (before.prompt_length, before.policy) == (after.prompt_length, after.policy)
        for name in before.cycles.__dataclass_fields__:
            left, right = getattr(before.cycles, name), getattr(after.cycles, name)
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)


def test_records_of_one_domain_are_found():
    one = decoded()
    records = RecordSet(("a", "b", "c"), ("math", "chat", "math"), (one, one, one))
    assert records.of_domain("math").ids == ("a", "c")
    assert RecordSet((), (), ()).temperature == 0.0


def test_records_of_different_kinds_are_not_mixed():
    with pytest.raises(DataError, match="share sampling"):
        RecordSet(("a", "b"), ("math", "math"), (decoded(0.0), decoded(1.0)))
    with pytest.raises(DataError, match="one id and one domain"):
        RecordSet(("a",), (), (decoded(),))


def test_a_foreign_or_damaged_record_file_is_refused(tmp_path: Path):
    from safetensors.numpy import save_file

    path = tmp_path / "records.safetensors"
    with pytest.raises(DataError, match="not a record file"):
        read_records(path)
    save_file({"x": np.zeros(1)}, path)
    with pytest.raises(DataError, match="schema is None"):
        read_records(path)
    path.write_bytes(b"not safetensors")
    with pytest.raises(DataError, match="not a record file"):
        read_records(path)


def test_an_unknown_finish_reason_is_refused(tmp_path: Path):
    import dataclasses

    path = tmp_path / "records.safetensors"
    wrong = dataclasses.replace(decoded(), finish_reason="tired")  # type: ignore[arg-type]
    write_records(path, RecordSet(("a",), ("math",), (wrong,)))
    with pytest.raises(DataError, match="'tired' is no finish reason"):
        read_records(path)


def test_calibration_gets_logits_outcomes_and_what_is_unknown():
    """Cycles: one accepted of three; none; an accepted eos, behind which two positions are unknown."""
    arrays = calibration_records([decoded(), decoded()])
    assert arrays.logits.shape == (6, 3) and arrays.logits.dtype == np.float32
    assert arrays.conversation.tolist() == [0, 0, 0, 1, 1, 1]
    assert arrays.accepted[:3].tolist() == [[True, False, False], [False] * 3, [True, False, False]]
    assert arrays.valid[:3].tolist() == [[True] * 3, [True, True, True], [True, False, False]]
    assert (arrays.temperature, arrays.label) == (0.0, "greedy_match")
    assert calibration_records([decoded(1.0)], [41]).conversation.tolist() == [41] * 3
    assert (label_of(0.0), label_of(0.7)) == ("greedy_match", "sampled")


def test_calibration_refuses_what_it_cannot_use():
    with pytest.raises(DataError, match="one temperature"):
        calibration_records([decoded(0.0), decoded(1.0)])
    with pytest.raises(DataError, match="one temperature"):
        calibration_records([])
    with pytest.raises(DataError, match="no draft"):
        calibration_records([decoded(gamma=0)])
