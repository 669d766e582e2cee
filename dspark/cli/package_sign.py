"""`dspark package keygen` and `dspark package sign`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import click

from dspark.cli.options import as_json, package_folder, print_json, registry_address, which_registry

_PASSWORD = "DSPARK_KEY_PASSWORD"


@click.command()
@click.argument("key", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--no-password", is_flag=True, help="Whoever can read the file can sign.")
def keygen(key: Path, no_password: bool) -> None:
    """Make a pair of ed25519 keys: FILE, which signs and stays secret, and FILE.pub, which checks.

    The password is asked for, or taken from DSPARK_KEY_PASSWORD.
    """
    from dspark.errors import SettingsError
    from dspark.package.signature import write_keys

    password = None
    if not no_password:
        password = os.environ.get(_PASSWORD) or (_asked(confirm=True) if sys.stdin.isatty() else None)
        if not password:
            raise SettingsError("a key needs a password", f"set {_PASSWORD}, or give --no-password")
    public = write_keys(key, password=password)
    click.echo(f"{key}: signs; keep it secret")
    click.echo(f"{public}: checks; give it to whoever serves")


@click.command()
@package_folder
@click.option(
    "--key", required=True, type=click.Path(path_type=Path), metavar="FILE", help="The private key (`keygen`)."
)
@click.option(
    "--register", metavar="ADDRESS", help="Also sign the registered version of it, such as models:/dspark-x@candidate."
)
@which_registry
@as_json
@click.pass_context
def sign(
    context: click.Context, folder: Path, key: Path, register: str | None, tracking_uri: str | None, json_output: bool
) -> None:
    """Verify a package and write manifest.sig, a signature of its manifest and so of every file.

    The password of an encrypted key is asked for, or taken from DSPARK_KEY_PASSWORD.
    """
    from dspark.package.signature import permissions_warning, public_of
    from dspark.package.signature import sign as sign_package

    sign_package(folder, key, password=_password)
    warning = permissions_warning(key)
    if warning:
        click.echo(f"warning: {warning}", err=True)
    version = None
    if register is not None:
        from dspark.registry.signing import register_signature

        version = register_signature(folder, register, tracking_uri=registry_address(context, tracking_uri))
    if json_output:
        where = {"model": version.name, "version": version.number} if version else {}
        print_json(
            {"schema": "dspark/sign/1", "folder": str(folder), **where, "warnings": [warning] if warning else []}
        )
        return
    click.echo(f"signed {folder / 'manifest.sig'}")
    if version is not None:
        click.echo(f"signed version {version.number} of {version.name} in the registry")
    command = ["dspark", "package", "verify", str(folder), "--key", str(public_of(key))]
    click.echo(f"check it with: {shlex.join(command)}")


def _password() -> str | None:
    return os.environ.get(_PASSWORD) or (_asked() if sys.stdin.isatty() else None)


def _asked(*, confirm: bool = False) -> str:
    secret: str = click.prompt("password of the key", hide_input=True, confirmation_prompt=confirm, err=True)
    return secret
