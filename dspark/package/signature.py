"""`manifest.sig`: a detached ed25519 signature of the manifest's bytes, and the keys that make and check it.

The manifest names every file by its digest, so that its signature speaks for the whole package. The signature is the
bare 64 bytes of RFC 8032, keys are PEM (PKCS #8 and SubjectPublicKeyInfo), so that openssl makes and checks them too.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.errors import IntegrityError, SettingsError
from dspark.io.atomic import write_bytes
from dspark.io.below import open_below
from dspark.package.layout import MANIFEST, SIGNATURE

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE_BYTES = 64
_MAX_KEY = 64 * 2**10
_KEYGEN = "dspark package keygen KEY.pem"


def public_of(private: Path) -> Path:
    """Where the public part of a pair of keys lies."""
    return private.with_name(f"{private.name}.pub")


def write_keys(private: Path, *, password: str | None = None) -> Path:
    """Make a pair of keys: the private one, readable by its owner alone, and beside it `<name>.pub`.

    Args:
        password: encrypts the private key; None: whoever can read the file can sign.
    Returns:
        the file of the public key.
    Raises:
        SettingsError: one of the files exists.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    public = public_of(private)
    for path in (private, public):
        if os.path.lexists(path):
            raise SettingsError(f"{path} exists, and a key is never written over", "name another file")
    key = Ed25519PrivateKey.generate()
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        encryption = serialization.BestAvailableEncryption(password.encode("utf-8"))
    data = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    private.parent.mkdir(parents=True, exist_ok=True)
    # Never readable by others, not even for a moment.
    with os.fdopen(os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as handle:
        handle.write(data)
    write_bytes(public, _public_pem(key.public_key()))
    return public


def sign(package: Path, key: Path, *, password: Callable[[], str | None] = lambda: None) -> bytes:
    """Verify a package and sign its manifest; a signature that was there is replaced.

    Args:
        key: the private key.
        password: asked for if the key is encrypted.
    Returns:
        the signature, as it stands in `manifest.sig`.
    Raises:
        IntegrityError: the package is not sound; nothing is signed.
        SettingsError: no private ed25519 key, or another password.
    """
    from dspark.package.verify import verify

    signer = read_private_key(key, password)
    verify(package)
    with open_below(package, MANIFEST) as handle:
        signature = signer.sign(handle.read())
    write_bytes(package / SIGNATURE, signature)
    return signature


def require_signature(package: Path, key: Path) -> None:
    """Demand that a package's manifest is signed with the private part of a key. The files are `verify`'s business.

    Raises:
        IntegrityError: no signature, or not of this manifest by that key.
        SettingsError: no public ed25519 key.
    """
    try:
        with open_below(package, MANIFEST) as handle:
            manifest = handle.read()
        with open_below(package, SIGNATURE) as handle:
            signature: bytes | None = handle.read(SIGNATURE_BYTES + 1)
    except FileNotFoundError:
        signature = None
    except (OSError, ValueError) as reason:
        raise IntegrityError(f"{package}: {SIGNATURE} or {MANIFEST} is no file: {reason}") from None
    check_signature(manifest if signature is not None else b"", signature, key, package)


def check_signature(manifest: bytes, signature: bytes | None, key: Path, where: Path | str) -> None:
    """The same of bytes, wherever they come from; `where` is what errors call the package."""
    from cryptography.exceptions import InvalidSignature

    public = read_public_key(key)
    if signature is None:
        raise IntegrityError(f"{where} is not signed", "whoever may sign it: dspark package sign FOLDER --key KEY.pem")
    try:
        public.verify(signature, manifest)
    except InvalidSignature:
        raise IntegrityError(
            f"{where}: {SIGNATURE} is no signature of this package by {key}",
            "it was signed with another key, or changed since: fetch it again, and ask whoever signs",
        ) from None


def read_public_key(path: Path) -> Ed25519PublicKey:
    """The public key in a PEM file.

    Raises:
        SettingsError: missing, or no public ed25519 key.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data = _read(path)
    if b"PRIVATE KEY" in data:
        raise SettingsError(
            f"{path} is a private key: checking needs the public one, and a private one belongs to whoever signs",
            f"openssl pkey -in {path} -pubout -out KEY.pem.pub",
        )
    try:
        key = load_pem_public_key(data)
    except Exception as reason:  # the package raises whatever breaks first
        raise SettingsError(f"{path} is no public key in PEM: {reason}", _KEYGEN) from None
    if not isinstance(key, Ed25519PublicKey):
        raise SettingsError(f"{path} is a key of another kind than ed25519", _KEYGEN)
    return key


def read_private_key(path: Path, password: Callable[[], str | None] = lambda: None) -> Ed25519PrivateKey:
    """The private key in a PEM file.

    Raises:
        SettingsError: missing, no private ed25519 key, or another password.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read(path)
    if b"PRIVATE KEY" not in data:
        raise SettingsError(f"{path} holds no private key", _KEYGEN)
    secret = (password() or None) if b"ENCRYPTED" in data else None
    if b"ENCRYPTED" in data and secret is None:
        raise SettingsError(f"{path} is encrypted and no password was given", "type it, or set DSPARK_KEY_PASSWORD")
    try:
        key = load_pem_private_key(data, None if secret is None else secret.encode("utf-8"))
    except Exception as reason:  # as above; its words do not hold the password
        raise SettingsError(f"{path}: cannot be read: {reason}", "is it the right password, and a PEM file?") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SettingsError(f"{path} is a key of another kind than ed25519", _KEYGEN)
    return key


def permissions_warning(private: Path) -> str | None:
    """A line about a private key that others than its owner may read or write, or None."""
    mode = stat.S_IMODE(private.stat().st_mode)
    if mode & 0o077:
        return f"{private} may be read or written by others (mode {mode:04o}): chmod 600 {private}"
    return None


def _public_pem(key: Ed25519PublicKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as handle:
            data = handle.read(_MAX_KEY + 1)
    except OSError as reason:
        raise SettingsError(f"{path}: {reason.strerror}", _KEYGEN) from None
    if len(data) > _MAX_KEY:
        raise SettingsError(f"{path} is too large for a key", _KEYGEN)
    return data
