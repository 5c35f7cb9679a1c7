"""The house as STYLE has it: arrows one way, light imports, small files, a tidy root."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("schemas", "streams", "producers", "consumers", "deploy")
ARROWS = {
    "schemas": set(),
    "streams": {"schemas"},
    "producers": {"schemas", "streams"},
    "consumers": {"schemas", "streams"},
    "deploy": {"schemas", "streams", "producers", "consumers"},
}
TOP_FOLDERS = {*ROOMS, "examples", "tests", "benchmarks", "docs"}
TOP_FILES = {"__init__.py"}
FORBIDDEN_NAMES = {"utils", "common", "helpers", "util", "helper"}
LIGHT_ROOMS = ("schemas", "streams", "deploy")
HEAVY = ("torch", "transformers", "math_verify", "pyarrow", "datasets", "vllm", "pandas")
WALL, TEST_WALL, FUNCTION_WALL = 400, 500, 40


def sources(*folders: str) -> list[Path]:
    found = [p for folder in folders for p in (ROOT / folder).rglob("*.py")]
    return sorted(p for p in found if "__pycache__" not in p.parts)


def rooms_imported(path: Path) -> set[str]:
    """Rooms that a file of the package imports, relatively or in full, anywhere in it."""
    package = ("streamrft", *path.relative_to(ROOT).parts[:-1])
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            names = [module] if len(module) > 1 else [(*module, a.name) for a in node.names]
            found |= {n[1] for n in names if n[0] == "streamrft" and len(n) > 1}
        elif isinstance(node, ast.Import):
            parts = [a.name.split(".") for a in node.names]
            found |= {p[1] for p in parts if p[0] == "streamrft" and len(p) > 1}
    return found & set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_one_way(room: str) -> None:
    allowed = ARROWS[room] | {room}
    wrong = {
        str(path.relative_to(ROOT)): sorted(rooms_imported(path) - allowed)
        for path in sources(room)
        if rooms_imported(path) - allowed
    }
    assert not wrong, f"{room} may import {sorted(allowed)} only: {wrong}"


def test_the_arrow_test_sees_relative_and_absolute_imports(tmp_path: Path) -> None:
    path = ROOT / "deploy" / "roles.py"
    assert {"producers", "consumers", "streams", "schemas"} <= rooms_imported(path)


@pytest.mark.parametrize("room", LIGHT_ROOMS)
def test_light_rooms_import_nothing_heavy(room: str) -> None:
    modules = [
        ".".join(("streamrft", *p.relative_to(ROOT).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        for p in sources(room)
    ]
    script = (
        "import sys, importlib\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"found = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        "sys.exit(f'imported: {found}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_files_stay_within_the_wall() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for p in sources(*ROOMS, "tests")
        if (n := len(p.read_text().splitlines()))
        > (TEST_WALL if p.is_relative_to(ROOT / "tests") else WALL)
    }
    assert not long, f"files over the wall of {WALL} (tests {TEST_WALL}) lines: {long}"


def test_functions_stay_within_the_wall() -> None:
    long: dict[str, int] = {}
    for path in sources(*ROOMS):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            assert node.end_lineno is not None
            body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
            num_lines = node.end_lineno - body[0].lineno + 1
            if num_lines > FUNCTION_WALL:
                long[f"{path.relative_to(ROOT)}:{node.name}"] = num_lines
    assert not long, f"functions over {FUNCTION_WALL} lines: {long}"


def test_nothing_strange_stands_at_the_root() -> None:
    folders = {
        p.name
        for p in ROOT.iterdir()
        if p.is_dir() and not p.name.startswith(".") and any(p.rglob("*.py"))
    }
    ignored = {"streamrft.egg-info", "build", "dist", "runs", "checkpoints", "shared"}
    assert folders - ignored <= TOP_FOLDERS
    assert {p.name for p in ROOT.glob("*.py")} <= TOP_FILES


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert not {p.stem for p in sources(*ROOMS)} & FORBIDDEN_NAMES


def test_every_package_is_listed_for_the_wheel() -> None:
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    present = {
        ".".join(("streamrft", *p.parent.relative_to(ROOT).parts))
        for p in sources(*ROOMS)
        if p.name == "__init__.py"
    }
    assert present <= set(listed)
