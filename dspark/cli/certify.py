"""`dspark certify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dspark.cli.completion import names_of
from dspark.cli.options import as_json, print_json, print_table, quiet_option, require_place, workspace_of
from dspark.errors import GateError

if TYPE_CHECKING:
    from dspark.evaluation.server import ServerCertificate


@click.command()
@click.option(
    "--drafter",
    required=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Its GGUF file, or the folder of its checkpoint.",
)
@click.option(
    "--url", required=True, metavar="URL", help="A llama.cpp (with --metrics), SGLang or vLLM server that runs with it."
)
@click.option(
    "--target",
    required=True,
    metavar="NAME",
    shell_complete=names_of("target"),
    help="The target of pipeline/targets that it serves.",
)
@click.option("--domain", "domains", multiple=True, metavar="NAME", help="Prompts of this domain only. Repeatable.")
@click.option("--prompts", default=8, show_default=True, type=click.IntRange(1), help="Prompts of each domain.")
@click.option("--new-tokens", default=96, show_default=True, type=click.IntRange(8), help="Limit of each reply.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write the certificate there, as JSON.")
@quiet_option
@as_json
@click.pass_context
def certify(
    context: click.Context,
    drafter: Path,
    url: str,
    target: str,
    domains: tuple[str, ...],
    prompts: int,
    new_tokens: int,
    out: Path | None,
    quiet: bool,
    json_output: bool,
) -> None:
    """Compare what a running server accepts with what its drafter should get accepted; exit code 6 unless they agree.

    Nothing is trained. llama.cpp, SGLang and vLLM are told apart by how they answer. The server must not serve others
    meanwhile, and must verify whole blocks (no scheduling).
    """
    from dspark.cli.display import shown
    from dspark.io.jsonfile import model_json, write_model
    from dspark.workspace.certify import CertifyRequest
    from dspark.workspace.certify import certify as certify_drafter

    if out is not None:
        require_place("--out", out)
    request = CertifyRequest(drafter, url, target, domains, prompts, new_tokens)
    with shown(quiet=quiet, events=None) as listener:
        certificate = certify_drafter(workspace_of(context), request, listener)
    if out is not None:
        write_model(out, certificate)
    if json_output:
        print_json(model_json(certificate))
    else:
        _show(certificate)
    if certificate.verdict == "inconclusive":
        raise GateError(f"{certificate.drafter}: {certificate.reason}", "more prompts, of more domains, tell more")
    if certificate.verdict == "disagrees":
        raise GateError(
            f"{certificate.drafter}: {certificate.reason}",
            "compare taps, RoPE base, mask token and quantisation of what the server loaded with this drafter's",
        )


def _prompts(certificate: ServerCertificate) -> str:
    left_out = f"; {certificate.left_out} more were too long" if certificate.left_out else ""
    return f"{certificate.prompts}, up to {certificate.max_new_tokens} tokens each{left_out}"


def _show(certificate: ServerCertificate) -> None:
    tau = certificate.tau
    positions = "  ".join(f"{one.engine}/{one.offline}" for one in certificate.accepted_by_position)
    print_table(
        [
            ("engine", f"{certificate.engine}, {certificate.served_target}"),
            ("drafter", f"{certificate.drafter}, gamma {certificate.gamma}, {certificate.n_max} drafts a block"),
            ("prompts", _prompts(certificate)),
            ("tau in the engine", str(tau.engine_tau)),
            ("tau offline", str(tau.offline_tau)),
            ("difference", f"{tau.relative_difference.value:+.2%}, tolerance {tau.tolerance:.0%}: {tau.result}"),
            ("accepted by position", f"{positions}  (engine/offline)"),
            ("equal counters", f"{certificate.tau.equal_counters} of {certificate.prompts} prompts"),
            ("tokens/s as served", str(certificate.tokens_per_second)),
            (
                "verdict",
                certificate.verdict if certificate.reason is None else f"{certificate.verdict}: {certificate.reason}",
            ),
        ]
    )
