from __future__ import annotations

import pytest

from dspark.profiling.cost import CostRow, compare_models, curve_fields


def rows(seconds, shapes, contexts=(64, 256)):
    return [
        CostRow(
            requests=requests,
            verify_tokens=requests * (1 + drafts),
            context=context,
            draft_seconds=0.001,
            verify_seconds=0.001,
            step_seconds=seconds(requests, requests * (1 + drafts), context),
            n=10,
            ci95=(0.0, 1.0),
        )
        for requests, drafts in shapes
        for context in contexts
    ]


SHAPES = [(requests, drafts) for requests in (1, 2, 4, 8) for drafts in (0, 1, 3, 7)]


@pytest.mark.parametrize("shapes", [SHAPES, [(r, k) for r in (1, 2, 4, 8) for k in (0, 1, 2, 4)]])
def test_where_requests_cost_the_additive_model_predicts_unseen_steps_and_the_curve_does_not(shapes):
    """10 ms + 2 ms a request + 1 ms a token. All 16 shapes but those of the fewest and of the most tokens lie between
    others, also where blocks of four make token counts that few shapes share."""
    errors = compare_models(rows(lambda r, m, c: 0.010 + 0.002 * r + 0.001 * m, shapes), 64)
    assert errors is not None and errors.cells == 14
    assert errors.additive_relative_error == pytest.approx(0, abs=1e-9)
    assert errors.curve_relative_error > 0.05
    assert errors.additive_is_closer


def test_where_tokens_are_all_that_costs_the_curve_is_as_good():
    errors = compare_models(rows(lambda r, m, c: 0.010 + 0.001 * m, SHAPES), 64)
    assert errors is not None
    assert errors.curve_relative_error == pytest.approx(0, abs=1e-9)


def test_the_error_of_the_curve_is_that_of_the_shapes_it_has_left():
    """Two numbers of requests, 2 and 4 tokens in common. Left out, (1, 2) is predicted by (2, 2) and the other way
    round; both models are exact at their probes, and the additive cost on all that remains. By hand: 10 and
    12 ms at 2 tokens, 16 and 20 ms at 4, 30 ms at 8 (2 requests) and 5 ms at 1 token (1 request)."""
    times = {(1, 1): 5, (1, 2): 10, (1, 4): 16, (2, 2): 12, (2, 4): 20, (2, 8): 30}
    measured = rows(lambda r, m, c: times[r, m] / 1000, [(1, 0), (1, 1), (1, 3), (2, 0), (2, 1), (2, 3)])
    errors = compare_models(measured, 8)
    assert errors is not None and errors.cells == 4
    curve = sorted([12 / 10 - 1, 1 - 10 / 12, 20 / 16 - 1, 1 - 16 / 20])
    assert errors.curve_relative_error == pytest.approx((curve[1] + curve[2]) / 2)
    # Without (1, 2) the requests' part is known from 4 tokens alone, 20 - 16 = 4 ms: 12 - 4 = 8 instead of 10; without
    # (2, 2) it is 10 + 4 = 14 instead of 12. Without (1, 4) or (2, 4) it is 2 ms: 18 instead of 16 and of 20.
    additive = sorted([2 / 10, 2 / 12, 2 / 16, 2 / 20])
    assert errors.additive_relative_error == pytest.approx((additive[1] + additive[2]) / 2)


def test_contexts_are_repeats_of_a_shape():
    fields = curve_fields(rows(lambda r, m, c: 0.010 + 0.002 * r + 0.001 * m + c * 1e-5, SHAPES), 64)
    assert fields["absent"] == {}
    middle = (64 + 256) / 2 * 1e-5
    assert fields["additive"].bias_seconds == pytest.approx(0.013 + middle)


@pytest.mark.parametrize(
    ("shapes", "says"),
    [([(1, 3), (2, 3), (4, 3), (8, 3)], "do not vary apart"), ([(1, 1), (1, 3), (2, 1)], "3 shapes")],
)
def test_what_could_not_be_fitted_is_absent_with_its_reason(shapes, says):
    fields = curve_fields(rows(lambda r, m, c: 0.010 + 0.001 * m, shapes), 64)
    assert fields["curve"] is not None and "additive" not in fields and "model_errors" not in fields
    assert says in fields["absent"]["additive"]


def test_models_that_cannot_be_compared_say_so():
    """Four shapes and four numbers to choose: with any of them left out the two parts cannot be told apart."""
    fields = curve_fields(rows(lambda r, m, c: 0.010 + 0.001 * m, [(1, 0), (1, 1), (2, 0), (2, 1)]), 4)
    assert fields["additive"] is not None and fields["model_errors"] is None
    assert "left out" in fields["absent"]["model_errors"]


def test_no_rows_give_neither():
    assert set(curve_fields([], 4)["absent"]) == {"curve", "additive"}


def test_the_curve_is_interpolated_where_its_probe_was_left_out():
    """Steps of 10 ms + 1 ms a token at 1, 2, 3, 4, 6 and 8 tokens, 1 or 2 requests: a staircase would be off at 3."""
    errors = compare_models(
        rows(lambda r, m, c: 0.010 + 0.001 * m, [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3)]), 8
    )
    assert errors is not None and errors.cells == 5
    assert errors.curve_relative_error == pytest.approx(0, abs=1e-9)
