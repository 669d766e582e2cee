"""`import dspark`: the public names, and what using them loads."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

import dspark

HEAVY_MODULES = ("torch", "transformers", "mlflow", "dvc", "onnx", "onnxruntime")


def in_a_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_dspark_loads_nothing_of_it() -> None:
    loaded = in_a_new_process("import sys, dspark; print([n for n in sys.modules if n.startswith('dspark.')])")
    assert loaded == "[]"


@pytest.mark.parametrize("name", dspark.LIGHT)
def test_names_of_the_light_base_load_nothing_heavy(name: str) -> None:
    """Each in a process of its own, in which importing a heavy module fails."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({HEAVY_MODULES})); import dspark; print(dspark.{name}.__name__)"
    )
    assert in_a_new_process(code) == name


def test_every_public_name_is_found_in_its_room() -> None:
    for name in dspark.__all__:
        assert getattr(dspark, name) is not None
    assert {*dspark.__all__} == {"__version__", *dspark.LIGHT, *dspark.HEAVY}
    assert {*dspark.__all__} <= {*dir(dspark)}
    with pytest.raises(AttributeError, match="no attribute 'PrefixSheduler'"):
        _ = dspark.PrefixSheduler  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", dspark.LIGHT | dspark.HEAVY)
def test_every_public_name_is_documented(name: str) -> None:
    found = getattr(dspark, name)
    assert found.__doc__ and len(found.__doc__) > 60
    if inspect.isfunction(found):
        described = found.__doc__
        assert "Raises:" in described, "which errors to expect"
        for parameter in inspect.signature(found).parameters:
            if parameter not in ("record", "records", "root", "path"):
                assert re.search(rf"\b{parameter}\b", described), f"{name}: {parameter}"


def test_without_torch_a_heavy_name_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import dspark\n"
        "try:\n    dspark.decode\nexcept dspark.DsparkError as e:\n    print(e.exit_code, e.message, '|', e.hint)"
    )
    said = in_a_new_process(code)
    assert said == "3 dspark.decode needs torch | pip install 'dspark[pipeline]'"


def test_names_of_rooms_are_no_imports_of_every_stage() -> None:
    """The digest of a stage's code covers what `dspark/__init__.py` imports: that must stay nothing."""
    from pathlib import Path

    from dspark.workspace.code import imported_modules

    found = set(imported_modules(Path(dspark.__file__).read_bytes(), "dspark", True))
    assert found <= {"dspark", "dspark.errors", "dspark.errors.PreflightError"}
