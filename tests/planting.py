"""Test files planted in a folder with this suite's conftest.py, and run there."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.mpi_job import rank_environment

ROOT = Path(__file__).parents[1]
PYTEST = [sys.executable, "-m", "pytest", "--color=no"]
PLAIN = [*PYTEST, "--junitxml=results.xml"]
BARE = rank_environment(1) | {"PYTHONPATH": str(ROOT)}
INI = f"""
[pytest]
pythonpath = {ROOT}
addopts = --import-mode=importlib --strict-markers
"""


@dataclass(frozen=True)
class Results:
    """What a planted run printed, and the outcome and the text of each of its tests."""

    returncode: int
    printed: str
    outcomes: dict[str, str]
    texts: dict[str, str]


def plant(folder: Path, **sources: str) -> Path:
    """Write test modules into `folder`, beside the conftest.py of this one."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "pytest.ini").write_text(INI)
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
    return folder


def run(folder: Path, *command: str, **variables: str) -> Results:
    """Run pytest in `folder` with a bare environment, and read what it reports."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=BARE | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    outcomes, texts = {}, {}
    xml = folder / "results.xml"
    for case in ElementTree.parse(xml).iter("testcase") if xml.exists() else ():
        name, found = case.get("name", ""), list(case)
        outcomes[name] = found[0].tag if found else "passed"
        texts[name] = "\n".join(element.text or "" for element in found)
    return Results(done.returncode, done.stdout + done.stderr, outcomes, texts)


def alive(pids: Path) -> list[int]:
    """Which of the two processes that a planted test has noted still run."""
    noted = [int(pid) for pid in pids.read_text().split()]
    assert len(noted) == 2
    return [pid for pid in noted if _command_line(pid)]


def _command_line(pid: int) -> bytes:
    """Empty once the process has ended, even if its parent has not collected it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    """Return as soon as `condition()` is true; fail if it isn't in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
