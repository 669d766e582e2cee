from __future__ import annotations

import threading

import pytest

from dspark.errors import IntegrityError, SettingsError
from dspark.features.ahead import ReadAhead
from dspark.features.sources import FeatureRow


class Source:
    """Sequences that are their own number, of a size each, and who fetched them when."""

    def __init__(self, size=10, ahead=True, broken=None):
        self.size, self.ahead, self.broken = size, ahead, broken
        self.fetched, self.threads, self.loads = [], set(), []

    def feature_bytes(self, index):
        return self.size

    def fetch(self, index):
        if index == self.broken:
            raise IntegrityError(f"sequence {index} is damaged")
        self.fetched.append(index)
        self.threads.add(threading.current_thread())
        return f"raw {index}"

    def load(self, indices, fetched):
        self.loads.append(list(indices))
        return [fetched.get(index, f"computed {index}") for index in indices]


def steps_of(source, count=3):
    """Step s has the sequences count*s .. count*s + count - 1."""
    return lambda step: [FeatureRow(source, count * step + number) for number in range(count)]


def test_every_step_gets_its_rows_in_order_and_all_were_read_by_the_other_thread():
    source = Source()
    ahead = ReadAhead(steps_of(source), 20, budget=60)
    for step in range(20):
        assert ahead.take(step) == [f"raw {3 * step + number}" for number in range(3)]
    ahead.close()
    assert source.fetched == list(range(60))
    assert threading.current_thread() not in source.threads


@pytest.mark.parametrize("budget", [30, 40, 75, 1000])
def test_what_is_held_never_takes_more_than_the_budget_and_fills_it(budget):
    """Three rows of ten bytes a step: the step at hand counts until the next is taken."""
    source = Source()
    ahead = ReadAhead(steps_of(source), 50, budget)
    for step in range(50):
        ahead.take(step)
    assert ahead.most_held <= budget
    assert ahead.most_held >= min(budget - 9, 30)
    ahead.close()


def test_the_thread_stops_where_the_budget_ends():
    source = Source()
    ahead = ReadAhead(steps_of(source), 50, budget=60)
    ahead.take(0)
    with ahead._changed:
        assert ahead._changed.wait_for(lambda: ahead._held == 60, timeout=10)
    assert len(source.fetched) <= 6
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def test_a_step_that_does_not_fit_is_refused_with_the_setting():
    with pytest.raises(SettingsError, match=r"store.read_budget_mib: .* step 1 take") as caught:
        ReadAhead(steps_of(Source(size=20 << 20)), 3, budget=40 << 20).take(0)
    assert "store.read_budget_mib" in caught.value.hint


def test_a_run_that_goes_on_in_the_middle_reads_from_there():
    source = Source()
    ahead = ReadAhead(steps_of(source), 20, budget=30)
    ahead.take(7)
    assert ahead.take(8) == ["raw 24", "raw 25", "raw 26"]
    assert ahead.take(3) == ["raw 9", "raw 10", "raw 11"]
    assert source.fetched[:3] == [21, 22, 23]
    ahead.close()


def test_damage_is_told_to_whoever_waits_for_it():
    ahead = ReadAhead(steps_of(Source(broken=4)), 5, budget=100)
    ahead.take(0)
    with pytest.raises(IntegrityError, match="sequence 4 is damaged"):
        ahead.take(1)
    ahead.close()


def test_what_cannot_be_read_ahead_is_loaded_together_when_its_step_comes():
    stored, computed = Source(), Source(ahead=False)
    rows = [FeatureRow(computed, 5), FeatureRow(stored, 1), FeatureRow(computed, 2)]
    ahead = ReadAhead(lambda step: rows, 2, budget=10)
    assert ahead.take(0) == ["computed 5", "raw 1", "computed 2"]
    assert computed.loads == [[5, 2]] and computed.fetched == []
    ahead.close()


def test_rows_that_are_in_memory_need_no_thread():
    ahead = ReadAhead(lambda step: ["a", "b"], 3)
    assert ahead.take(0) == ["a", "b"]
    assert ahead._thread is None
