"""`dspark overfit`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dspark.cli.options import (
    as_json,
    duration,
    print_json,
    print_table,
    quiet_option,
    request_of,
    which_build,
    workspace_of,
)
from dspark.errors import StageError

if TYPE_CHECKING:
    from dspark.evaluation.overfit import OverfitReport


@click.command()
@which_build
@click.option("--sequences", default=8, show_default=True, type=click.IntRange(1), help="Prompts to learn by heart.")
@click.option("--new-tokens", default=48, show_default=True, type=click.IntRange(2), help="Limit of each answer.")
@click.option("--steps", default=200, show_default=True, type=click.IntRange(1), help="Training steps at most.")
@click.option(
    "--learning-rate", default=0.01, show_default=True, type=click.FloatRange(0, min_open=True), help="At its highest."
)
@click.option(
    "--share",
    default=0.9,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Of the blocks, that must be accepted whole.",
)
@quiet_option
@as_json
@click.pass_context
def overfit(
    context: click.Context,
    target: str | None,
    build: str | None,
    flags: tuple[str, ...],
    sequences: int,
    new_tokens: int,
    steps: int,
    learning_rate: float,
    share: float,
    quiet: bool,
    json_output: bool,
) -> None:
    """Train on a handful of answers until whole blocks are accepted in decoding; exit code 5 if they are not.

    The first thing to run for a new target: a wrong tap, position or mask token shows here in minutes. Nothing is kept.
    """
    from dspark.cli.display import shown
    from dspark.io.jsonfile import model_json
    from dspark.workspace.overfit import overfit_target
    from dspark.workspace.run import resolve_request

    workspace = workspace_of(context)
    resolved = resolve_request(workspace, request_of(target, build, flags)).chosen
    with shown(quiet=quiet, events=None) as listener:
        report = overfit_target(
            workspace,
            resolved,
            listener,
            sequences=sequences,
            steps=steps,
            learning_rate=learning_rate,
            new_tokens=new_tokens,
            share=share,
        )
    if json_output:
        print_json(model_json(report))
    else:
        _show(report)
    if not report.reached:
        raise StageError(*refusal(report))


def refusal(report: OverfitReport) -> tuple[str, str]:
    """What went wrong and what to do, by whether training itself got there."""
    what = f"target {report.target}: {report.whole_blocks} of {report.cycles} blocks were accepted whole"
    if report.learned:
        return (
            f"{what}, although the drafter knows the texts by heart",
            "training and decoding see different things: compare taps, positions, mask token and dtypes of the target",
        )
    worst = min(report.greedy_match)
    return (
        f"{what}: after {report.steps} steps the drafter has only {worst:.0%} of the texts' tokens right",
        "more --steps, or another --learning-rate; if neither helps, the features say too little: look at the taps",
    )


def _show(report: OverfitReport) -> None:
    counts = "  ".join(f"{length}: {count}" for length, count in enumerate(report.accepted))
    match = " ".join(f"{value:.3f}" for value in report.greedy_match)
    print_table(
        [
            ("target", report.target),
            ("drafter", report.geometry),
            ("learned", f"{report.response_tokens} tokens of {report.sequences} answers"),
            ("training", f"{report.steps} steps in {duration(report.seconds)}"),
            ("greedy match by position", match),
            ("accepted of each block", f"{counts}  ({report.cycles} blocks of {report.gamma})"),
            ("whole blocks", f"{report.whole_blocks / report.cycles:.1%}, {report.wanted_share:.0%} are asked for"),
            ("tokens per cycle", f"{report.tokens_per_cycle:.2f} of {report.gamma + 1}"),
            ("answers as without drafts", f"{report.equal_answers} of {report.sequences}"),
            ("verdict", "reached" if report.reached else "not reached"),
        ]
    )
