from __future__ import annotations

import json

import pytest

from dspark.corpus.sequences import read_sequences
from dspark.errors import DataError

ROW = {
    "id": "d/1",
    "sample": 0,
    "domain": "d",
    "prompt_ids": [5, 6, 7],
    "response_ids": [8, 9],
    "finish_reason": "stop",
}


def write(tmp_path, *rows):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_sequence_is_the_prompt_and_then_the_answer(tmp_path):
    (sequence,) = read_sequences(write(tmp_path, ROW))
    assert (sequence.id, sequence.domain, sequence.finish_reason) == ("d/1#0", "d", "stop")
    assert sequence.token_ids == [5, 6, 7, 8, 9]
    assert sequence.prompt_length == 3


def test_the_loss_lies_on_the_answer_alone(tmp_path):
    (sequence,) = read_sequences(write(tmp_path, ROW))
    assert sequence.loss_mask.tolist() == [False, False, False, True, True]


def test_samples_of_one_prompt_are_sequences_of_their_own(tmp_path):
    path = write(tmp_path, ROW, ROW | {"sample": 1, "finish_reason": "length"})
    assert [sequence.id for sequence in read_sequences(path)] == ["d/1#0", "d/1#1"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"response_ids": []}, "response_ids"),
        ({"prompt_ids": []}, "prompt_ids"),
        ({"response_ids": [1, -1]}, "response_ids.1"),
        ({"response_ids": [1.0]}, "response_ids.0"),
        ({"finish_reason": "eos"}, "finish_reason"),
        ({"sample": -1}, "sample"),
        ({"text": "decoded"}, "text"),
    ],
)
def test_a_row_that_breaks_the_contract_is_an_error_with_its_line(tmp_path, change, field):
    with pytest.raises(DataError, match=rf"train\.jsonl:2: {field}"):
        read_sequences(write(tmp_path, ROW, ROW | {"id": "d/2"} | change))


def test_the_same_sample_twice_is_an_error_that_names_both_lines(tmp_path):
    with pytest.raises(DataError, match=r"train\.jsonl:3: sample 0 of prompt 'd/1' already stands on line 1"):
        read_sequences(write(tmp_path, ROW, ROW | {"sample": 1}, ROW))


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match="file not found"):
        read_sequences(tmp_path / "train.jsonl")
