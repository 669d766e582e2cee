"""Two promotions at once: two processes, one SQLite registry. `make test-services` does it a hundred times."""

from __future__ import annotations

import os
import shutil

import pytest
import race

from dspark.registry.receipts import default_uri

ROUNDS = int(os.environ.get("DSPARK_RACE_ROUNDS", "3"))


@pytest.mark.slow
def test_two_promotions_at_once_have_one_winner_each_time(published, tmp_path):
    (tmp_path / "mlflow").mkdir()
    shutil.copyfile(published / "mlflow" / "mlflow.db", tmp_path / "mlflow" / "mlflow.db")
    result = race.race(default_uri(tmp_path), tmp_path, ROUNDS)
    print(f"SQLite: {result}")
    race.check(result, ROUNDS)
