"""`dspark profiles`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dspark.cli.completion import names_of
from dspark.cli.options import as_json, print_json, print_table, workspace_of
from dspark.cli.root import Subverbs

if TYPE_CHECKING:
    from dspark.config.models import ServingProfile


@click.group(cls=Subverbs, subcommand_metavar="VERB ...")
def profiles() -> None:
    """List and show serving profiles."""


@profiles.command("list")
@as_json
@click.pass_context
def list_all(context: click.Context, json_output: bool) -> None:
    """All serving profiles of the workspace."""
    from dspark.workspace.profiles import describe_profiles

    rows = describe_profiles(workspace_of(context))
    if json_output:
        print_json({"schema": "dspark/profiles/1", "profiles": [row.as_json() for row in rows]})
        return
    print_table(
        [(row.name, row.engine, row.hardware, row.access, row.description) for row in rows],
        ("name", "engine", "hardware", "access", ""),
    )


@profiles.command()
@click.argument("name", shell_complete=names_of("serving profile"))
@as_json
@click.pass_context
def show(context: click.Context, name: str, json_output: bool) -> None:
    """What a profile declares, and which builds name it."""
    from dspark.workspace.profiles import show_profile

    profile, builds = show_profile(workspace_of(context), name)
    if json_output:
        document = {"schema": "dspark/profile-description/1", "profile": profile.model_dump(mode="json")}
        print_json(document | {"builds": builds})
        return
    limits, spread = profile.limits, profile.parallelism
    facts = {
        "name": profile.name,
        "description": profile.description,
        "engine": f"{profile.engine} {profile.engine_versions or ''}".strip(),
        "hardware": str(profile.hardware),
        "parallelism": f"tensor {spread.tensor}, pipeline {spread.pipeline}, data {spread.data}",
        "requests at a time": str(limits.requests or ""),
        "context": f"{limits.context} tokens" if limits.context else "",
        "dtype": _dtype(profile),
        "threads": str(profile.threads or "all"),
        "profiled at": f"{_numbers(profile.requests)} requests, contexts of {_numbers(profile.contexts)} tokens",
        "certified at": f"{_numbers(profile.certify_concurrency)} requests",
        "policies": ", ".join(profile.policies),
        "access": profile.access if profile.reason is None else f"{profile.access}: {profile.reason}",
        "with the drafter": profile.url or "",
        "without it": profile.plain_url or "",
        "in profiling mode": profile.profile_url or "",
        "recording confidences": profile.records_url or "",
        "builds": ", ".join(builds),
    }
    print_table([(key, value) for key, value in facts.items() if value])
    for level in profile.service_levels:
        first = f", first token within {level.first_token_seconds:g} s" if level.first_token_seconds else ""
        click.echo(
            f"service level: at {level.requests} requests {level.tokens_per_second_per_user:g} tokens/s a user{first}"
        )


def _dtype(profile: ServingProfile) -> str:
    """As declared, and what this processor makes of it."""
    from dspark.device import declared
    from dspark.processor import arithmetic

    computed = arithmetic(profile.dtype, declared(profile)) if profile.engine == "reference" else profile.dtype
    return profile.dtype if computed == profile.dtype else f"{profile.dtype}, on this processor {computed}"


def _numbers(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
