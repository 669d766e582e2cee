"""`reference/api.md`: the public names, with signature and docstring, read from the source without importing it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import dspark

_SECTIONS = {"Args": "Takes", "Returns": "Gives", "Raises": "Raises", "Attributes": "Has"}
_HEAD = """# Python API

Every public name of `dspark`, made from its docstring when the site is built; [how they are used](python.md).
`from dspark import NAME` loads the name's room then, not before.
"""
Definition = ast.FunctionDef | ast.ClassDef


def page() -> str:
    """The whole page."""
    parts = [_HEAD, "## In the light base install\n\nnumpy and pydantic; no torch is loaded.\n"]
    for names, heading in ((dspark.LIGHT, ""), (dspark.HEAVY, "## With `dspark[pipeline]`\n\nThese load torch.\n")):
        parts += [heading, *(part for name, home in names.items() for part in _named(name, home))]
    return "\n".join(parts)


def _named(name: str, home: str) -> Iterator[str]:
    definition = _find(name, home)
    yield f"### `{name}`\n"
    yield f"```python\n{_signature(definition)}\n```\n"
    yield _docstring(definition)
    if isinstance(definition, ast.ClassDef):
        for method in definition.body:
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                yield f"#### `{name}.{method.name}`\n"
                yield f"```python\n{_signature(method)}\n```\n"
                yield _docstring(method)
    yield f"Source: `dspark/{home.replace('.', '/')}.py`\n"


def _find(name: str, home: str) -> Definition:
    path = Path(dspark.__file__).parent.joinpath(*home.split(".")).with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
    raise LookupError(f"dspark.{name} is not defined in {path}")


def _signature(definition: Definition) -> str:
    """`def name(arguments) -> result`, an argument a line where it is long; of a class that of its constructor."""
    decorators = [f"@{ast.unparse(one)}\n" for one in definition.decorator_list if not isinstance(one, ast.Call)]
    if isinstance(definition, ast.FunctionDef):
        return "".join(decorators) + _call(f"def {definition.name}", definition)
    bases = f"({', '.join(ast.unparse(base) for base in definition.bases)})" if definition.bases else ""
    for method in definition.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            return _call(f"class {definition.name}", method)
    fields = [ast.unparse(one) for one in definition.body if isinstance(one, ast.AnnAssign) and _public(one)]
    return "\n".join([f"class {definition.name}{bases}:", *(f"    {field}" for field in fields or ["..."])])


def _public(field: ast.AnnAssign) -> bool:
    made_later = field.value is not None and "init=False" in ast.unparse(field.value)
    return isinstance(field.target, ast.Name) and not field.target.id.startswith("_") and not made_later


def _call(what: str, function: ast.FunctionDef) -> str:
    result = f" -> {ast.unparse(function.returns)}" if function.returns and function.name != "__init__" else ""
    arguments = [_spaced(one) for one in _apart(ast.unparse(function.args)) if one not in ("self", "cls")]
    line = f"{what}({', '.join(arguments)}){result}"
    if len(line) <= 100:
        return line
    return f"{what}(\n" + "".join(f"    {one},\n" for one in arguments) + f"){result}"


def _apart(arguments: str) -> list[str]:
    """Arguments one by one; commas inside of brackets do not separate."""
    pieces: list[str] = [""]
    depth = 0
    for character in arguments:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece.strip() for piece in pieces if piece.strip()]


def _spaced(argument: str) -> str:
    """Blanks around the default of an argument that has a type, which `ast.unparse` leaves out."""
    return re.sub(r"^([^=]*:[^=]*)=", r"\1 = ", argument)


def _docstring(definition: Definition) -> str:
    """Prose as it stands; of each section a list with an item per name."""
    shown: list[str] = []
    section = ""
    for line in inspect.cleandoc(ast.get_docstring(definition) or "").splitlines():
        heading = line.rstrip(":") if line.endswith(":") and not line.startswith(" ") else ""
        if heading in _SECTIONS:
            section = heading
            shown += ["", f"**{_SECTIONS[section]}**", ""]
        elif section and line.startswith("    ") and not line.startswith("     "):
            shown.append("- " + _item(line.strip()) if section != "Returns" or not shown[-1] else line.strip())
        elif line.startswith("    ") and not section:
            shown.append(line)  # an example or a formula, which Markdown takes for code
        else:
            shown.append(("  " if section and line.strip() else "") + line.strip())
    return "\n".join(shown) + "\n"


def _item(text: str) -> str:
    name, found, rest = text.partition(":")
    plain = found and re.fullmatch(r"[\w, |\[\]]+", name)
    return f"`{name}`:{rest}" if plain else text
