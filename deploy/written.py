"""What sources register, read from their text: nothing is imported, so it costs milliseconds.

Only what is written plainly is seen, `@WORKFLOWS.register("name")` and the like. Whoever does not
find a name here knows nothing yet, and has to ask the registries themselves (`names.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ..schemas.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
# where the entries of a registry of ours stand, by the registry's name in the code
PLACES = {
    "WORKFLOWS": "producers/workflows",
    "REWARDS": "producers/rewards",
    "FILTERS": "streams/filters.py",
    "PRIORITIES": "streams/priority.py",
    "ADVANTAGES": "consumers/algorithms/advantages",
    "POLICY_LOSSES": "consumers/algorithms/losses",
    "KL_LOSSES": "consumers/algorithms/kl.py",
    "ENTROPY_LOSSES": "consumers/algorithms/entropy.py",
    "AGGREGATIONS": "consumers/algorithms/aggregation.py",
}

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# names of the arguments of what is registered; None where the text does not tell them
Entries = Mapping[str, frozenset[str] | None]


def entries_of(family: str, plugins: Iterable[Path]) -> Entries:
    """What is registered in a family by ours and by plug-in files, as far as their texts tell.

    Raises:
        ConfigError: a plug-in file is no Python.
    """
    place = ROOT / PLACES[family]
    found: dict[str, frozenset[str] | None] = {}
    for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
        found |= _registered(ast.parse(path.read_bytes()), family)
    for path in plugins:
        found |= _registered(_parsed(path), family)
    return found


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise ConfigError(
            f"--plugin-dir: {path}:{error.lineno}: {error.msg}: {(error.text or '').strip()}"
        ) from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--plugin-dir: {path} cannot be read: {why}") from error


def _registered(tree: ast.Module, family: str) -> dict[str, frozenset[str] | None]:
    found: dict[str, frozenset[str] | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _name_in(node, family)):
            found.setdefault(name, None)
        if isinstance(node, Definition):
            for call in node.decorator_list:
                if _is_plain(call, family) and (name := _name_in(call, family)):
                    found[name] = _arguments(node)
    return found


def _name_in(call: ast.expr, family: str) -> str:
    """The text in `FAMILY.register("text")`, or in a call of a wrapper that is named like it."""
    if not isinstance(call, ast.Call) or not call.args:
        return ""
    first, what = call.args[0], call.func
    is_wrapper = isinstance(what, ast.Name) and what.id.endswith("register")
    if isinstance(first, ast.Constant) and (is_wrapper or _is_plain(call, family)):
        return first.value if isinstance(first.value, str) else ""
    return ""


def _is_plain(call: ast.expr, family: str) -> bool:
    """Whether it calls FAMILY.register, however FAMILY was imported."""
    what = call.func if isinstance(call, ast.Call) else None
    if not isinstance(what, ast.Attribute) or what.attr != "register":
        return False
    owner = what.value
    name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return name == family


def _arguments(node: Definition) -> frozenset[str] | None:
    """Names that it takes, of a dataclass its fields; None for a class that may inherit them."""
    if not isinstance(node, ast.ClassDef):
        return _names_of(node.args)
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            return _names_of(inner.args)
    fields = (n.target for n in node.body if isinstance(n, ast.AnnAssign))
    return None if node.bases else frozenset(f.id for f in fields if isinstance(f, ast.Name))


def _names_of(args: ast.arguments) -> frozenset[str] | None:
    if args.kwarg is not None:
        return None
    return frozenset(a.arg for a in _each(args)) - {"self"}


def _each(args: ast.arguments) -> Iterator[ast.arg]:
    yield from args.posonlyargs
    yield from args.args
    yield from args.kwonlyargs
