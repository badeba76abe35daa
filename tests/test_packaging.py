"""What is installed is what is in the folders, kernels/ included."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = ROOT / "pyproject.toml"


def listed_packages() -> list[str]:
    """`packages` of pyproject.toml; Python 3.10 has no TOML reader."""
    text = PYPROJECT.read_text().partition("\npackages = ")[2]
    packages: list[str] = ast.literal_eval(text[: text.index("]") + 1])
    return packages


def packages_in_folders() -> list[str]:
    names = []
    for top, package in (("mpiscale", "mpiscale"), ("kernels", "mpiscale.kernels")):
        for folder in {path.parent for path in (ROOT / top).rglob("*.py")}:
            inside = folder.relative_to(ROOT / top).parts
            names.append(".".join([package, *inside]))
    return sorted(names)


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` with modules found in `folder` and installed ones only."""
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path[0] = {str(folder)!r}; {code}",
    ]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from an sdist, built from a checkout that has lost its link."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("built")
    leave = shutil.ignore_patterns("__pycache__", "kernels")
    for name in ("mpiscale", "kernels"):
        shutil.copytree(ROOT / name, copy / name, ignore=leave)
    for path in (PYPROJECT, ROOT / "LICENSE", *ROOT.glob("README.md")):
        shutil.copy(path, copy)
    build = "from setuptools import build_meta; build_meta.build_{}({!r})"
    sdist = python(build.format("sdist", str(out)), copy)
    assert sdist.returncode == 0, sdist.stderr
    with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        archive.extractall(out, filter="data")
    (unpacked,) = (path for path in out.iterdir() if path.is_dir())
    built = python(build.format("wheel", str(out)), unpacked)
    assert built.returncode == 0, built.stderr
    return next(out.glob("*.whl"))


def test_listed_packages_are_the_folders():
    assert sorted(listed_packages()) == packages_in_folders()


def test_every_package_has_an_init_file():
    folders = [path.parent for path in (ROOT / "mpiscale").rglob("*.py")]
    folders += [path.parent for path in (ROOT / "kernels").rglob("*.py")]
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_kernels_is_reached_through_a_link():
    link = ROOT / "mpiscale" / "kernels"
    assert link.is_symlink()
    assert link.readlink() == Path("../kernels")


def test_kernels_refuses_its_other_name():
    attempt = python("import kernels", ROOT)
    assert attempt.returncode != 0
    assert "ImportError" in attempt.stderr
    assert "mpiscale.kernels" in attempt.stderr


def test_wheel_holds_every_file_of_every_package(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    kernels = [path.relative_to(ROOT) for path in (ROOT / "kernels").rglob("*.py")]
    others = [path.relative_to(ROOT) for path in (ROOT / "mpiscale").rglob("*.py")]
    expected = {f"mpiscale/{path.as_posix()}" for path in kernels}
    # Older Pythons follow the link in rglob, newer ones don't.
    assert held == expected | {path.as_posix() for path in others}


def test_wheel_has_real_kernel_files_and_can_be_imported(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    assert not (tmp_path / "mpiscale" / "kernels").is_symlink()
    code = "import mpiscale.kernels as k; print(k.__file__)"
    imported = python(code, tmp_path)
    assert imported.returncode == 0, imported.stderr
    assert Path(imported.stdout.strip()).is_relative_to(tmp_path)
