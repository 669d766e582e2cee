"""Runs on the tracking server: found by the random name of their journal, made once."""

from __future__ import annotations

from typing import Any

from dspark.registry.events import Started
from dspark.registry.records import fitted_tag, metric_key
from dspark.registry.register import JOURNAL_TAG
from dspark.registry.tracking import Registry

EVENTS_TAG = "dspark.events"  # how many events of the journal were delivered


def find_run(registry: Registry, started: Started) -> tuple[str, int] | None:
    """The run of a journal on the server and how many of its events it has; None if it is not there."""
    # A workspace that was moved has an experiment of its own; its runs may be in the one before.
    experiments = registry.client.search_experiments(filter_string="name LIKE 'dspark%'")
    ids = [registry.experiment_id, *(item.experiment_id for item in experiments)]
    wanted = f"tags.`{JOURNAL_TAG}` = '{started.journal}'"
    found = registry.client.search_runs(list(dict.fromkeys(ids)), wanted)
    if not found:
        return None
    first, *doubles = sorted(found, key=lambda run: (-_events(run), run.info.run_id))
    for double in doubles:  # a creation that got no answer and arrived after it was repeated
        registry.client.delete_run(double.info.run_id)
    return str(first.info.run_id), _events(first)


def create_run(registry: Registry, started: Started) -> str:
    """Make the run of a journal; its first event is delivered with that.

    Returns:
        the run's id on the server.
    """
    tags = {
        JOURNAL_TAG: started.journal,
        EVENTS_TAG: "1",
        "dspark.run": started.run,
        "dspark.build": started.build,
        "dspark.command": started.command,
        "dspark.version": started.dspark_version,
        "dspark.host": started.host,
        "mlflow.user": started.user,
        "mlflow.source.name": started.command,
    }
    created = registry.client.create_run(
        registry.experiment_id,
        start_time=milliseconds(started.time),
        tags={key: fitted_tag(value) for key, value in tags.items()},
        run_name=f"{started.build}-{started.run}",
    )
    return str(created.info.run_id)


def _events(run: Any) -> int:
    return int(run.data.tags.get(EVENTS_TAG, "0"))


def log_event(registry: Registry, run_id: str, at: float, metrics: dict[str, float], tags: dict[str, str]) -> None:
    """Log metrics and tags of one event.

    Args:
        at: the event's own time, so that logging it again adds no point.
    """
    from mlflow.entities import Metric, RunTag

    registry.client.log_batch(
        run_id,
        metrics=[Metric(metric_key(key), value, milliseconds(at), 0) for key, value in metrics.items()],
        tags=[RunTag(metric_key(key), fitted_tag(value)) for key, value in tags.items()],
    )


def milliseconds(seconds: float) -> int:
    """MLflow's unit of time."""
    return round(seconds * 1000)
