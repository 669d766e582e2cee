"""`dspark evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from dspark.cli.options import (
    as_json,
    how_to_watch,
    one_output,
    print_json,
    print_table,
    request_of,
    short,
    which_build,
    workspace_of,
)

if TYPE_CHECKING:
    from dspark.evaluation.suite import SuiteReport


@click.command()
@which_build
@click.option("--study", metavar="NAME", help="Of pipeline/studies: depth, length, rank, threshold, load, yours.")
@click.option("--suite", metavar="NAME", help="A suite of pipeline/suites, for instance paper.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The folder with the files of its sets; nothing is fetched.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="For the results.  [default: builds/BUILD/suites/NAME]",
)
@click.option("--only", multiple=True, metavar="SET", help="This set only. Repeatable.")
@click.option("--prompts", type=click.IntRange(1), metavar="N", help="Of each set at most.  [default: the suite's]")
@click.option("--new-tokens", type=click.IntRange(2), metavar="N", help="Limit of a reply.  [default: the suite's]")
@click.option(
    "--temperature",
    "temperatures",
    multiple=True,
    type=click.FloatRange(0),
    metavar="T",
    help="Of the target. Repeatable.  [default: the suite's]",
)
@click.option("--throughput", is_flag=True, help="Measure tokens/s on the suite's prompts too.")
@how_to_watch
@as_json
@click.pass_context
def evaluate(
    context: click.Context,
    target: str | None,
    build: str | None,
    flags: tuple[str, ...],
    study: str | None,
    suite: str | None,
    data: Path | None,
    out: Path | None,
    only: tuple[str, ...],
    prompts: int | None,
    new_tokens: int | None,
    temperatures: tuple[float, ...],
    throughput: bool,
    quiet: bool,
    events: str | None,
    debug: bool,
    json_output: bool,
) -> None:
    """Evaluate a finished build on benchmark sets (--suite), or builds that differ in a few settings (--study).

    A suite is asked beside the build's evidence and without touching it: whole blocks are verified, and the first turn
    of a conversation is asked. A study trains and evaluates what it compares, as far as that is not done; all variants
    share the build's corpus, and nothing is packaged or registered. The same command goes on where it was stopped.
    """
    one_output(json_output, events)
    wanted = request_of(target, build, flags, debug=debug or context.obj["debug"])
    if study is not None:
        _refuse_with_study(context)
        from dspark.cli.study import evaluate_study

        evaluate_study(workspace_of(context), wanted, study, quiet=quiet, events=events, json_output=json_output)
        return
    if suite is None or data is None:
        raise click.UsageError("name what to evaluate: --suite NAME --data DIR, or --study NAME")
    from dspark.cli.display import shown
    from dspark.io.jsonfile import model_json
    from dspark.workspace.evaluate import SuiteRequest, evaluate_on_suite
    from dspark.workspace.run import resolve_request

    workspace = workspace_of(context)
    resolved = resolve_request(workspace, wanted).chosen
    request = SuiteRequest(suite, data, out, only, prompts, new_tokens, temperatures, throughput)
    with shown(quiet=quiet, events=events) as listener:
        folder, report = evaluate_on_suite(workspace, resolved, request, listener)
    if json_output:
        print_json(model_json(report))
    elif events != "-":
        _show(report)
        click.echo(f"results  {short(folder)}")


def _refuse_with_study(context: click.Context) -> None:
    """Options of a suite say nothing about a study."""
    for name in ("suite", "data", "out", "only", "prompts", "new_tokens", "temperatures", "throughput"):
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            flag = "--temperature" if name == "temperatures" else f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} is for a suite, not for a study")


def _show(report: SuiteReport) -> None:
    for temperature, found in report.temperatures.items():
        click.echo(f"suite {report.inputs.suite}, temperature {temperature}, gamma {report.gamma}, {found.dtype}")
        rows = [
            (name, one.group, f"{one.asked} of {one.rows}", str(found.sets[name].tau))
            if name in found.sets
            else (name, one.group, f"{one.asked} of {one.rows}", found.absent[name])
            for name, one in report.origins.items()
        ]
        rows += [(f"mean of {group}", group, "", str(mean.tau)) for group, mean in found.groups.items()]
        if found.mean is not None:
            rows.append(("mean of all", "", "", str(found.mean.tau)))
        print_table(rows, header=("set", "group", "prompts", "tau [95 %]"))
    for name, one in report.origins.items():
        for told in _told(one.turns_left_out, one.rejected):
            click.echo(f"{name}: {told}")
    if report.throughput is not None:
        speeds = [(name, str(arm.load.tokens_per_second)) for name, arm in report.throughput.arms.items()]
        print_table(speeds, header=("arm", "tokens/s"))


def _told(turns: int, rejected: dict[str, int]) -> list[str]:
    """What was not asked of a set, and why."""
    lines = [f"{turns} later turns of its conversations are not asked"] if turns else []
    return [*lines, *(f"{count} rows rejected: {reason}" for reason, count in rejected.items())]
