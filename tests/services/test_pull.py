"""Pulling from services that run for real: `mlflow server` on loopback, and S3 as moto serves it.

Published and asked with the released MLflow and boto3; only the services are this machine's own.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import fake_build
import mlflow_server
import pytest

from dspark.errors import IntegrityError, ServiceError, SettingsError
from dspark.package.assemble import assemble
from dspark.package.signature import sign, write_keys
from dspark.package.verify import read_manifest, verify
from dspark.registry import artifacts
from dspark.registry.lookup import find_version
from dspark.registry.publish import publish
from dspark.registry.pull import pull
from dspark.registry.signing import register_signature

ADDRESS = "models:/dspark-demo@candidate"


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def made(root: Path, steps_per_second: str) -> Path:
    """A package whose costs are these."""
    sources = fake_build.make(root)
    cost = sources.costs[fake_build.CPU]
    cost.write_text(cost.read_text().replace("60.0", steps_per_second))
    assemble(sources, root / "package", card=fake_build.card)
    return root / "package"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    return made(tmp_path_factory.mktemp("one"), "60.0")


@pytest.fixture(scope="module")
def another(tmp_path_factory) -> Path:
    return made(tmp_path_factory.mktemp("another"), "61.0")


@pytest.fixture(scope="module")
def server(tmp_path_factory, asked_for):
    """`mlflow server` as it comes, which hands out artifacts of a folder."""
    root = tmp_path_factory.mktemp("server")
    place = ("--backend-store-uri", f"sqlite:///{root / 'mlflow.db'}", "--artifacts-destination")
    with mlflow_server.mlflow_server(root, *place, str(root / "artifacts")) as address:
        yield address


def client(server):
    import mlflow

    return mlflow.MlflowClient(server, server)


def test_from_a_real_server_that_hands_artifacts_out(server, pristine, tmp_path):
    """The artifacts of an experiment lie wherever the server says: proxied."""
    connection = client(server)
    public = write_keys(tmp_path / "key.pem")
    publish(pristine, workspace=tmp_path, build="demo", receipts=tmp_path / "receipts", tracking_uri=server)
    assert find_version(ADDRESS, server).artifacts.startswith("mlflow-artifacts:/")
    connection.set_registered_model_alias("dspark-demo", "staging", "1")
    pull("models:/dspark-demo@staging", tmp_path / "p", tracking_uri=server)
    assert tree(tmp_path / "p") == tree(pristine)
    for absent in ("models:/dspark-demo@production", "models:/dspark-demo/9", "models:/dspark-other@candidate"):
        with pytest.raises(SettingsError, match="not in the registry"):
            pull(absent, tmp_path / "r", tracking_uri=server)
    # Signed after it was published: the tag is set by REST, and travels with the copy below.
    sign(Path(shutil.copytree(pristine, tmp_path / "signed")), tmp_path / "key.pem")
    register_signature(tmp_path / "signed", ADDRESS, tracking_uri=server)
    # Promotion copies versions under another name; the copy has no artifacts of its own.
    connection.copy_model_version("models:/dspark-demo/1", "dspark-demo-production")
    pull("models:/dspark-demo-production/1", tmp_path / "q", tracking_uri=server, key=public)
    assert verify(tmp_path / "q", key=public).signature == "valid"
    assert tree(tmp_path / "q") == tree(tmp_path / "signed")


def test_from_s3(server, s3, another, tmp_path):
    """The registry is a server, the artifacts lie in a bucket and are read from there."""
    connection = client(server)
    if connection.get_experiment_by_name("dspark") is not None:
        connection.rename_experiment(connection.get_experiment_by_name("dspark").experiment_id, "proxied")
    connection.create_experiment("dspark", artifact_location="s3://models/some where/ü")
    publish(another, workspace=tmp_path, build="demo", receipts=tmp_path / "receipts", tracking_uri=server)
    version = find_version(ADDRESS, server)
    assert version.artifacts.startswith("s3://models/some where/ü")
    manifest = pull(ADDRESS, tmp_path / "p", tracking_uri=server)
    assert tree(tmp_path / "p") == tree(another) and manifest == read_manifest(another)

    keys = [item["Key"] for item in s3.list_objects_v2(Bucket="models", Prefix="some where/")["Contents"]]
    (weights,) = (key for key in keys if key.endswith("drafter/model.safetensors"))
    good = s3.get_object(Bucket="models", Key=weights)["Body"].read()
    for bad in (good[:-1] + bytes([good[-1] ^ 1]), None):
        if bad is None:
            s3.delete_object(Bucket="models", Key=weights)
        else:
            s3.put_object(Bucket="models", Key=weights, Body=bad)
        with pytest.raises(IntegrityError, match=r"drafter/model\.safetensors"):
            pull(ADDRESS, tmp_path / "q", tracking_uri=server)
    s3.put_object(Bucket="models", Key=weights, Body=good)
    pull(ADDRESS, tmp_path / "q", tracking_uri=server)
    assert tree(tmp_path / "q") == tree(another)


def test_a_bucket_that_is_not_there_or_out_of_reach_is_a_failed_service(s3, tmp_path, monkeypatch):
    store = artifacts.artifacts_at("s3://none/x", "http://127.0.0.1:9")
    with pytest.raises(ServiceError, match="NoSuchBucket"), store.open("y"):
        pass
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", "nonsense")
    with pytest.raises(SettingsError, match="MLFLOW_S3_ENDPOINT_URL"):
        artifacts.artifacts_at("s3://models/x", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", f"http://127.0.0.1:{mlflow_server.free_port()}")
    store = artifacts.artifacts_at("s3://models/x", "http://127.0.0.1:9")
    with pytest.raises(ServiceError, match="Could not connect"), store.open("y"):
        pass
