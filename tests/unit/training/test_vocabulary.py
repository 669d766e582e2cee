from types import SimpleNamespace

import pytest
import torch

from dspark.errors import SettingsError
from dspark.training.vocabulary import draft_columns, select_draft_tokens


def rows(*responses):
    """Sequences with a prompt of two tokens 9."""
    return [SimpleNamespace(token_ids=torch.tensor([9, 9, *r]), prompt_length=2) for r in responses]


def test_the_most_frequent_response_tokens_are_chosen():
    """Counts 5: 3, 7: 2, 3: 1, 4: 1; prompt tokens don't count; ties go to the lower id."""
    chosen = select_draft_tokens(rows([5, 7, 5], [5, 3, 7, 4]), 3, 12, always=(), never=())
    assert chosen.tolist() == [3, 5, 7]
    assert chosen.dtype == torch.int64


def test_end_of_sequence_tokens_are_in_and_the_mask_token_is_out():
    chosen = select_draft_tokens(rows([5, 7, 5], [5, 3, 7, 4]), 3, 12, always=(11,), never=(5,))
    assert chosen.tolist() == [3, 7, 11]


def test_places_left_go_to_the_lowest_ids():
    assert select_draft_tokens(rows([5]), 4, 12, always=(), never=(0,)).tolist() == [1, 2, 3, 5]


@pytest.mark.parametrize(("size", "always", "never"), [(1, (1, 2), ()), (12, (), (3,)), (4, (3,), (3,))])
def test_what_cannot_be_chosen_is_refused(size, always, never):
    with pytest.raises(SettingsError, match="draft_vocab_size"):
        select_draft_tokens(rows([5]), size, 12, always=always, never=never)


def test_columns_are_the_inverse_of_the_ids():
    columns = draft_columns(torch.tensor([2, 5, 6]), 8)
    assert columns.tolist() == [-1, -1, 0, -1, -1, 1, 2, -1]
