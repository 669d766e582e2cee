"""What `dspark plan --what-if` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dspark.cli.options import print_json, print_table
from dspark.errors import PreflightError

if TYPE_CHECKING:
    from dspark.evaluation.prediction import Prediction
    from dspark.package.what_if import Setting, WhatIf
    from dspark.workspace.layout import Workspace


def print_what_if(workspace: Workspace, build: str, text: str, *, json_output: bool) -> None:
    """Answer from the package of a finished build.

    Raises:
        PreflightError: it has none.
        DsparkError: the question has no answer in it; says why.
    """
    from dspark.io.jsonfile import model_json
    from dspark.package.change import parse_change
    from dspark.package.what_if import what_if

    change = parse_change(text)
    folder = workspace.build(build) / "package"
    if not folder.is_dir():
        raise PreflightError(f"build {build!r} has no package to answer from", f"dspark run --build {build}")
    answer = what_if(folder, change)
    if json_output:
        print_json(model_json(answer))
        return
    click.echo(f"build {answer.build}: {_setting(answer.current)} now, {_setting(answer.changed)} instead")
    print_table(_rows(answer), _HEADER)
    click.echo()
    for line in answer.rests_on:
        click.echo(f"rests on  {line}")


_PREDICTED = ("tau", "tokens/s", "s/token")
_HEADER = ("requests", "policy", *_PREDICTED, "certified tokens/s", *_PREDICTED, "change")


def _rows(answer: WhatIf) -> list[tuple[str, ...]]:
    from dspark.report.words import NOTHING, significant

    rows: list[tuple[str, ...]] = []
    for point in answer.points:
        ratio = NOTHING
        if point.current is not None and point.changed is not None:
            ratio = f"{point.changed.tokens_per_second / point.current.tokens_per_second - 1:+.1%}"
        rows.append(
            (
                str(point.concurrency),
                point.policy,
                *_cells(point.current),
                significant(point.certified_tokens_per_second),
                *_cells(point.changed),
                ratio,
            )
        )
    return rows


def _cells(found: Prediction | None) -> tuple[str, str, str]:
    from dspark.report.words import NOTHING

    if found is None:
        return (NOTHING,) * 3
    return f"{found.tau:.2f}", f"{found.tokens_per_second:.3g}", f"{found.latency_per_token_seconds:.3g}"


def _setting(setting: Setting) -> str:
    return f"gamma {setting.gamma} on {setting.profile}"
