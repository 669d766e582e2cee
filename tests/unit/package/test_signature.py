"""A signature speaks for every byte of a package, openssl agrees, and what is no key or signature is said so."""

from __future__ import annotations

import shlex
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from dspark.cli.boundary import run_command
from dspark.errors import IntegrityError, SettingsError
from dspark.package.signature import permissions_warning, read_public_key, require_signature, sign, write_keys
from dspark.package.verify import read_manifest, verify


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> tuple[Path, Path]:
    """(private, public) without a password."""
    private = tmp_path_factory.mktemp("keys") / "key.pem"
    return private, write_keys(private)


def test_a_signed_package_is_sound_and_its_digests_are_the_same(package, keys):
    private, public = keys
    before = read_manifest(package)
    assert verify(package).signature == "none"
    signature = sign(package, private)
    assert (package / "manifest.sig").read_bytes() == signature and len(signature) == 64
    assert read_manifest(package) == before
    unchecked = verify(package)
    assert (unchecked.signature, unchecked.authenticated) == ("not checked", "nothing") and unchecked.note.endswith(
        "it has a signature file, unchecked: verify it with --key FILE"
    )
    checked = verify(package, key=public)
    assert (checked.signature, checked.authenticated) == ("valid", "everything") and "signed" in checked.note
    assert sign(package, private) == signature  # ed25519 draws nothing; the earlier signature is replaced


def test_any_64_bytes_are_not_called_a_signature_before_they_were_checked(package, keys):
    (package / "manifest.sig").write_bytes(bytes(64))
    assert "signed" not in verify(package).note and "unchecked" in verify(package).note
    with pytest.raises(IntegrityError):
        verify(package, key=keys[1])


def test_without_a_signature_or_with_another_key_it_is_refused(package, keys, tmp_path):
    _, public = keys
    with pytest.raises(IntegrityError, match="is not signed"):
        verify(package, key=public)
    other = tmp_path / "other.pem"
    write_keys(other)
    sign(package, other)
    for check in (lambda: verify(package, key=public), lambda: require_signature(package, public)):
        with pytest.raises(IntegrityError, match="no signature of this package") as caught:
            check()
        assert caught.value.exit_code == 7


def test_the_signature_of_one_package_is_none_of_another(package, pristine, keys, tmp_path, reseal):
    """Also where everything in the other is right by itself: the digests, the form, the links between the files."""
    private, public = keys
    sign(package, private)
    other = Path(shutil.copytree(package, tmp_path / "other"))
    (other / "evidence/train/curves.csv").write_text("step,loss,dev_anchor_tau\n1,9.5,\n")
    reseal(other)
    assert verify(other).signature == "not checked"
    with pytest.raises(IntegrityError, match="no signature of this package"):
        verify(other, key=public)


def test_a_valid_signature_does_not_make_changed_files_sound(package, keys):
    private, public = keys
    sign(package, private)
    (package / "README.md").write_bytes(b"changed")
    require_signature(package, public)  # of the manifest alone
    with pytest.raises(IntegrityError, match="README"):
        verify(package, key=public)


def test_what_is_not_sound_is_not_signed(package, keys):
    (package / "README.md").write_bytes(b"changed")
    with pytest.raises(IntegrityError):
        sign(package, keys[0])
    assert not (package / "manifest.sig").exists()


@pytest.mark.parametrize("data", [b"", b"x", bytes(63), bytes(65), b"-----BEGIN SIGNATURE-----\n"])
def test_what_cannot_be_a_signature_is_refused_even_if_nobody_asks(package, data):
    (package / "manifest.sig").write_bytes(data)
    with pytest.raises(IntegrityError, match="no ed25519 signature"):
        verify(package)


def test_a_linked_signature_is_refused(package, keys, tmp_path):
    private, public = keys
    sign(package, private)
    (package / "manifest.sig").rename(tmp_path / "elsewhere")
    (package / "manifest.sig").symlink_to(tmp_path / "elsewhere")
    for key in (None, public):
        with pytest.raises(IntegrityError):
            verify(package, key=key)
    with pytest.raises(IntegrityError):
        require_signature(package, public)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
@pytest.mark.parametrize("maker", ["dspark", "openssl"])
def test_openssl_and_dspark_read_each_others_keys_and_signatures(package, tmp_path, maker):
    private, public = tmp_path / "key.pem", tmp_path / "key.pem.pub"
    if maker == "dspark":
        write_keys(private)
    else:
        _openssl("genpkey", "-algorithm", "ed25519", "-out", private)
        _openssl("pkey", "-in", private, "-pubout", "-out", public)
    sign(package, private)
    files = ("-rawin", "-in", package / "manifest.json", "-sigfile", package / "manifest.sig")
    _openssl("pkeyutl", "-verify", "-pubin", "-inkey", public, *files)
    _openssl("pkeyutl", "-sign", "-inkey", private, *files[:3], "-out", package / "manifest.sig")
    verify(package, key=public)


def _openssl(*arguments) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def test_a_password_is_asked_for_and_must_be_right(package, tmp_path):
    private = tmp_path / "key.pem"
    public = write_keys(private, password="pässword")
    assert b"ENCRYPTED" in private.read_bytes()
    for wrong in (lambda: None, lambda: "", lambda: "password"):
        with pytest.raises(SettingsError) as caught:
            sign(package, private, password=wrong)
        assert caught.value.exit_code == 2
    sign(package, private, password=lambda: "pässword")
    verify(package, key=public)


def test_an_open_key_asks_for_no_password(package, keys):
    def asked() -> str:
        raise AssertionError("asked")

    sign(package, keys[0], password=asked)


def test_a_private_key_is_its_owners_alone_and_never_written_over(tmp_path):
    private = tmp_path / "key.pem"
    public = write_keys(private)
    assert stat.S_IMODE(private.stat().st_mode) == 0o600 and permissions_warning(private) is None
    assert b"PRIVATE" not in public.read_bytes()
    private.chmod(0o640)
    assert "chmod 600" in permissions_warning(private)
    before = private.read_bytes()
    with pytest.raises(SettingsError, match="never written over"):
        write_keys(private)
    private.rename(tmp_path / "moved.pem")
    with pytest.raises(SettingsError, match="never written over"):  # of the public one
        write_keys(private)
    assert (tmp_path / "moved.pem").read_bytes() == before and not private.exists()


def _pem(key, private: bool) -> bytes:
    if private:
        plain = serialization.NoEncryption()
        return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "No such file"),
        (b"", "no public key"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "no public key"),
        (b"x" * 100_000, "too large"),
        (_pem(ec.generate_private_key(ec.SECP256R1()), False), "another kind"),
        (_pem(ed25519.Ed25519PrivateKey.generate(), True), "is a private key"),
    ],
)
def test_what_is_no_public_key_is_a_usage_error_that_says_what_it_is(package, tmp_path, data, said):
    path = tmp_path / "key"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(SettingsError, match=said) as caught:
        verify(package, key=path)
    assert caught.value.hint
    with pytest.raises(SettingsError):
        read_public_key(path)


@pytest.mark.parametrize("kind", ["empty", "another kind", "public"])
def test_what_is_no_private_key_signs_nothing(package, tmp_path, kind):
    data = {
        "empty": b"",
        "another kind": _pem(ec.generate_private_key(ec.SECP256R1()), True),
        "public": _pem(ed25519.Ed25519PrivateKey.generate(), False),
    }[kind]
    (tmp_path / "key").write_bytes(data)
    with pytest.raises(SettingsError):
        sign(package, tmp_path / "key")
    assert not (package / "manifest.sig").exists()


def test_the_verbs(package, tmp_path, capsys, monkeypatch):
    key = tmp_path / "key.pem"
    monkeypatch.delenv("DSPARK_KEY_PASSWORD", raising=False)
    assert run_command(["package", "keygen", str(key)]) == 2  # no terminal, no password
    monkeypatch.setenv("DSPARK_KEY_PASSWORD", "secret")
    assert run_command(["package", "keygen", str(key)]) == 0
    assert run_command(["package", "verify", str(package), "--key", f"{key}.pub"]) == 7
    assert run_command(["package", "sign", str(package), "--key", str(key)]) == 0
    assert run_command(["package", "verify", str(package), "--key", f"{key}.pub", "--json"]) == 0
    assert '"signature": "valid"' in capsys.readouterr().out
    key.chmod(0o644)
    monkeypatch.delenv("DSPARK_KEY_PASSWORD")
    assert run_command(["package", "sign", str(package), "--key", str(key)]) == 2
    monkeypatch.setenv("DSPARK_KEY_PASSWORD", "secret")
    assert run_command(["package", "sign", str(package), "--key", str(key)]) == 0
    said = capsys.readouterr()
    assert "chmod 600" in said.err and "secret" not in said.out + said.err
    told = said.out.splitlines()[-1]
    assert told == f"check it with: dspark package verify {package} --key {key}.pub"
    assert run_command(shlex.split(told.removeprefix("check it with: dspark "))) == 0
