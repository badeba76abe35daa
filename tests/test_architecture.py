"""The arrows of the architecture: which part of mpiscale may import which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SERIAL = "backend errors rng kernels tensor gradcheck ops nn models optim data"
MAY_IMPORT = {
    "backend": "",
    "errors": "",
    "rng": "backend",
    "kernels": "backend rng",
    "tensor": "backend errors",
    "gradcheck": "backend tensor",
    "ops": "backend errors rng kernels tensor",
    "nn": "backend errors rng tensor ops",
    "models": "backend errors rng tensor ops nn",
    "optim": "backend errors kernels tensor nn",  # nn holds the flat buffers
    "data": "backend errors rng",
    "comm": "backend errors",  # arrays and ranks; knows no Tensor
    "parallel": f"{SERIAL} comm",
    "train": f"{SERIAL} comm parallel",
    "bench": f"{SERIAL} comm parallel train",
    "doctor": f"{SERIAL} comm",
    "cli": f"{SERIAL} comm parallel train bench doctor",
}
KNOW_MPI = {"comm", "parallel", "train", "doctor", "cli"}
READ_THE_ENVIRONMENT = {"mpiscale/comm/world.py", "kernels/choose.py"}
ENVIRONMENT = {"environ", "environb", "getenv", "putenv"}
MOST_LINES = 400
LIBRARY = [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "mpiscale").rglob("*.py")]
OTHERS = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part_of(path: Path) -> str:
    inside = path.relative_to(ROOT).parts
    return inside[0] if inside[0] == "kernels" else Path(inside[1]).stem


def imported_names(path: Path) -> list[str]:
    """Every module or object that a file imports anywhere, with its full name."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the import in full"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def imported_parts(path: Path) -> set[str]:
    split = [name.split(".") for name in imported_names(path)]
    return {name[1] for name in split if name[0] == "mpiscale" and len(name) > 1}


library = pytest.mark.parametrize("path", LIBRARY, ids=name_of)
everything = pytest.mark.parametrize("path", LIBRARY + OTHERS, ids=name_of)


@library
def test_imports_follow_the_arrows(path):
    part = part_of(path)
    if part == "__init__":
        return  # mpiscale/__init__.py re-exports the public names
    forbidden = imported_parts(path) - {part, *MAY_IMPORT[part].split()}
    assert not forbidden, f"{part} may import {MAY_IMPORT[part]!r}, got {forbidden}"


@library
def test_serial_parts_know_no_mpi(path):
    if part_of(path) not in KNOW_MPI:
        mpi = [name for name in imported_names(path) if name.split(".")[0] == "mpi4py"]
        assert not mpi, f"only {sorted(KNOW_MPI)} may import mpi4py, got {mpi}"


@library
def test_environment_is_read_in_two_files_only(path):
    if name_of(path) in READ_THE_ENVIRONMENT:
        return
    tree = ast.walk(ast.parse(path.read_text()))
    uses = [
        n.lineno for n in tree if isinstance(n, ast.Attribute) and n.attr in ENVIRONMENT
    ]
    assert not uses, f"lines {uses}: take an argument, or ask {READ_THE_ENVIRONMENT}"
    assert not {f"os.{name}" for name in ENVIRONMENT}.intersection(imported_names(path))


@everything
def test_file_is_short_and_says_what_it_is(path):
    text = path.read_text()
    lines = text.count("\n")
    assert lines <= MOST_LINES, f"{lines} lines, at most {MOST_LINES}: cut it by ideas"
    empty_package = path.name == "__init__.py" and not text
    assert empty_package or ast.get_docstring(ast.parse(text)), "no docstring"


def test_every_part_has_its_row():
    assert {part_of(path) for path in LIBRARY} - {"__init__"} <= MAY_IMPORT.keys()
