"""One address from the first layer that names one, absolute, its password kept to itself."""

from __future__ import annotations

import pytest

from dspark.config.resolve import build_names
from dspark.errors import SettingsError
from dspark.registry.address import checked, tracking_address
from dspark.registry.reach import shown
from dspark.registry.receipts import default_uri

DSPARK, MLFLOW = "http://dspark.example:1", "http://mlflow.example:2"


def test_the_first_layer_that_names_a_server_wins(tmp_path):
    assert tracking_address(tmp_path) == default_uri(tmp_path)
    (tmp_path / "params.yaml").write_text("training: {steps: 1}\n")
    assert tracking_address(tmp_path) == default_uri(tmp_path)
    (tmp_path / "params.yaml").write_text("tracking:\n  uri: https://yaml.example/mlflow/\n")
    assert tracking_address(tmp_path) == "https://yaml.example/mlflow"
    layers = {"MLFLOW_TRACKING_URI": MLFLOW}
    assert tracking_address(tmp_path, environment=layers) == MLFLOW
    layers["DSPARK_TRACKING_URI"] = DSPARK
    assert tracking_address(tmp_path, environment=layers) == DSPARK
    assert tracking_address(tmp_path, "https://flag.example", layers) == "https://flag.example"
    empty = dict.fromkeys(layers, "")  # CI systems set variables that nobody filled in
    assert tracking_address(tmp_path, environment=empty) == "https://yaml.example/mlflow"


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:5000",
        "https://user:secret@host/prefix",
        "postgresql://user:secret@db.example:5432/mlflow",
        "postgresql+psycopg2://db/mlflow",
        "sqlite:////absolute/mlflow.db",
    ],
)
def test_addresses_that_can_work(address):
    assert checked(address, "here") == address


@pytest.mark.parametrize(
    "address",
    ["mlruns", "./mlruns", "/srv/mlruns", "file:///srv/mlruns", "sqlite:///mlflow.db", "http://", "ftp://h/x"],
)
def test_what_cannot_work_is_refused_with_where_it_comes_from(tmp_path, address):
    with pytest.raises(SettingsError, match=r"--tracking-uri: .*") as caught:
        tracking_address(tmp_path, address)
    assert address in caught.value.message and "sqlite:////" in caught.value.hint
    (tmp_path / "params.yaml").write_text(f"training: {{steps: 1}}\ntracking:\n  uri: {address}\n")
    with pytest.raises(SettingsError, match=r"params\.yaml:3: "):
        tracking_address(tmp_path)


def test_a_mistake_in_params_yaml_names_its_line_and_the_likely_key(tmp_path):
    (tmp_path / "params.yaml").write_text("tracking:\n  url: http://h\n")
    with pytest.raises(SettingsError, match=r"params\.yaml:2: unknown key 'tracking\.url'") as caught:
        tracking_address(tmp_path)
    assert "'uri'" in caught.value.hint
    (tmp_path / "params.yaml").write_text("tracking: [http://h]\n")
    with pytest.raises(SettingsError, match=r"params\.yaml:1: "):
        tracking_address(tmp_path)


def test_builds_take_no_offence_at_a_tracking_server(tmp_path):
    from dspark.config.build import BuildReader
    from dspark.config.declared import Mistakes

    (tmp_path / "params.yaml").write_text("tracking: {uri: 'http://h'}\n")
    with pytest.raises(Mistakes) as caught:  # nothing else is declared here
        BuildReader(tmp_path).build("x", [])
    assert "tracking" not in str(caught.value) and build_names(tmp_path) == []


def test_a_password_is_not_shown():
    assert shown("postgresql://user:secret@db:5432/m") == "postgresql://user:***@db:5432/m"
    assert shown("https://user:p%40ss@host/x") == "https://user:***@host/x"
    assert shown("https://user@host/x") == "https://user@host/x"
    assert shown("sqlite:////a/b.db") == "sqlite:////a/b.db"
    with pytest.raises(SettingsError) as caught:
        checked("ftp://user:secret@host/x", "here")
    assert "secret" not in caught.value.message
