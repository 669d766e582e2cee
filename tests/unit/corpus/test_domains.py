from __future__ import annotations

import gzip
import json
import re
import sys

import pytest

from dspark.config.models import DomainSpec
from dspark.corpus.domains import domain_file, read_domain
from dspark.errors import DataError, PreflightError, SettingsError


def package_spec(**source):
    defaults = {
        "kind": "package",
        "package": "toy_problems",
        "file": "data/problems.jsonl.gz",
        "field": "prompt",
        "install": "toy-problems>=1",
    }
    return DomainSpec.model_validate({"name": "toy", "source": defaults | source})


@pytest.fixture
def toy_package(tmp_path, monkeypatch):
    """An importable package whose import would fail: its data must be found without importing it."""
    folder = tmp_path / "site" / "toy_problems"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    rows = [
        {"task_id": "T/0", "prompt": "def f():\n"},
        {"task_id": "T/1", "prompt": 5},
        {"task_id": "T/2"},
        {"task_id": "T/3", "prompt": "def {text}(): # {{ x }}\n\n"},
    ]
    data = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    (folder / "data" / "problems.jsonl.gz").write_bytes(gzip.compress(data.encode()))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder


def test_a_package_gives_its_wrapped_prompts_and_rejects_the_rest(toy_package, tmp_path):
    spec = package_spec(wrap="Complete:\n```python\n{text}\n```")
    reading = read_domain(spec, tmp_path)
    assert [(prompt.id, prompt.messages[0].content) for prompt in reading.prompts] == [
        ("toy/T/0", "Complete:\n```python\ndef f():\n```"),
        ("toy/T/3", "Complete:\n```python\ndef {text}(): # {{ x }}\n```"),
    ]
    assert [(row.line, row.id, row.reason) for row in reading.rejections] == [
        (2, "T/1", "prompt: must be text, is a number"),
        (3, "T/2", "prompt: missing"),
    ]
    assert reading.blank_lines == 1
    assert reading.prompts[0].source == "toy_problems:data/problems.jsonl.gz"
    assert "toy_problems" not in sys.modules


def test_a_missing_package_names_the_requirement(tmp_path):
    with pytest.raises(
        PreflightError, match=re.escape("'no_such_package' is not installed; it comes with 'no-such>=1'")
    ) as e:
        domain_file(package_spec(package="no_such_package", install="no-such>=1"), tmp_path)
    assert e.value.hint == "pip install 'no-such>=1'"


def test_a_package_without_the_file_names_the_requirement(toy_package, tmp_path):
    with pytest.raises(PreflightError, match=r"has no file 'data/other\.jsonl'; 'toy-problems>=1' should bring it"):
        domain_file(package_spec(file="data/other.jsonl"), tmp_path)


def test_data_beside_the_package_is_found_through_the_list_of_installed_files(toy_package, tmp_path):
    site = toy_package.parent
    (site / "share").mkdir()
    (site / "share" / "more.jsonl").write_text("")
    info = site / "toy_problems-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-problems\nVersion: 1.0\n")
    (info / "RECORD").write_text("toy_problems/__init__.py,,\nshare/more.jsonl,,\n")
    assert domain_file(package_spec(file="more.jsonl"), tmp_path) == site / "share" / "more.jsonl"


def test_text_around_a_prompt_must_have_a_place_for_it(toy_package, tmp_path):
    with pytest.raises(SettingsError, match=r"source\.wrap does not hold \{text\}"):
        read_domain(package_spec(wrap="Complete this."), tmp_path)


def test_a_file_that_is_not_gzip_is_an_error(toy_package, tmp_path):
    path = toy_package / "data" / "problems.jsonl.gz"
    for data in (b"plain", path.read_bytes()[:-9]):
        path.write_bytes(data)
        with pytest.raises(DataError, match="not a gzip file"):
            read_domain(package_spec(), tmp_path)


def test_json_lines_are_read_relative_to_the_domain_or_from_an_absolute_path(tmp_path, make_domain):
    spec = make_domain("mine", [{"id": "a", "prompt": "Hello?"}])
    assert [prompt.id for prompt in read_domain(spec, tmp_path).prompts] == ["mine/a"]
    absolute = DomainSpec.model_validate(
        {"name": "mine", "source": {"kind": "jsonl", "path": str(tmp_path / "mine.jsonl")}}
    )
    assert read_domain(absolute, tmp_path / "elsewhere").prompts[0].id == "mine/a"


def test_rows_may_name_their_template(tmp_path, make_domain):
    spec = make_domain("mine", [{"prompt": "2 + 2", "template": "sum"}, {"prompt": "Hi"}])
    assert [prompt.template for prompt in read_domain(spec, tmp_path).prompts] == ["sum", None]


def test_a_file_that_is_not_there_is_a_mistake_in_the_settings(tmp_path):
    spec = DomainSpec.model_validate({"name": "mine", "source": {"kind": "jsonl", "path": "nowhere.jsonl"}})
    with pytest.raises(SettingsError, match=r"domain 'mine': .*nowhere\.jsonl is not a file"):
        read_domain(spec, tmp_path)


def test_templates_become_prompts_with_their_template_as_unit(tmp_path):
    (tmp_path / "t.yaml").write_text("variants: 2\ntemplates:\n  - {id: sum, text: '{a} + 1', values: {a: 1..99}}\n")
    spec = DomainSpec.model_validate({"name": "m", "source": {"kind": "templates", "path": "t.yaml"}})
    reading = read_domain(spec, tmp_path)
    assert [(prompt.id, prompt.template, prompt.line) for prompt in reading.prompts] == [
        ("m/sum/0", "sum", 3),
        ("m/sum/1", "sum", 3),
    ]
    assert all(re.fullmatch(r"\d+ \+ 1", prompt.messages[0].content) for prompt in reading.prompts)
