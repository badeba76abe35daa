"""The conductor: one process per contender, and never two of them at work at once.

A machine's speed changes from minute to minute, with its temperature and its other
users. Steps of A and B are therefore taken in turn, A B A B ..., and each step of B is
compared with the step of A just before it.
"""

from __future__ import annotations

import json
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

# They choose OpenBLAS's kernels for another CPU than this one: an old choice slows a
# new NumPy several times.
REMOVED_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
REPLY_LIMIT_S = 900.0  # torch.compile takes minutes
END_LIMIT_S = 10.0
STDERR_LINES = 15


class ContenderError(RuntimeError):
    """A contender ended or fell silent; the message holds the end of its stderr."""


def clean_command(module: str, threads: int, *arguments: str) -> list[str]:
    """A command that runs `module` of ours without the variables that mislead BLAS.

    NumPy's BLAS, Numba and PyTorch read their number of threads when they are loaded.
    """
    unset = [word for name in REMOVED_VARIABLES for word in ("-u", name)]
    threads_too = [f"OMP_NUM_THREADS={threads}", f"NUMBA_NUM_THREADS={threads}"]
    return ["env", *unset, *threads_too, sys.executable, "-m", module, *arguments]


def mpirun() -> str | None:
    """The mpirun of this Python's environment, or else that on the PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


class ContenderProcess:
    """The other end of `bench/contender.py`'s conversation."""

    def __init__(self, command: Sequence[str], limit_s: float = REPLY_LIMIT_S) -> None:
        self.command, self.limit_s = list(command), limit_s
        self._stderr = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )

    def ask(self, **message: Any) -> Any:
        """Send a message and wait for its reply.

        Raises:
            ContenderError: if the process ended, or did not answer in time.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("ended") from None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(self.limit_s):
                raise self._failure(f"has not answered for {self.limit_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failure("ended")
        return json.loads(line)

    def exit_code(self) -> int | None:
        """The process's, once it has ended."""
        return self._process.poll()

    def close(self, limit_s: float = END_LIMIT_S) -> None:
        """Let the process end, and end it if it has not after `limit_s` seconds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already, with a message unread
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()

    def _failure(self, what: str) -> ContenderError:
        self._stderr.seek(0)
        last = self._stderr.read().splitlines()[-STDERR_LINES:]
        said = "\n".join(["its last lines:", *last]) if last else "it printed nothing"
        return ContenderError(f"contender {' '.join(self.command)} {what}; {said}")


@contextmanager
def contenders(
    commands: Sequence[Sequence[str]],
) -> Iterator[list[ContenderProcess]]:
    """Start a process for each command; at the end, however it comes, end them all."""
    with ExitStack() as stack:
        processes = []
        for command in commands:
            process = ContenderProcess(command)
            stack.callback(process.close)
            processes.append(process)
        yield processes


def alternate(
    processes: Sequence[ContenderProcess],
    messages: Iterable[dict[str, Any]],
    pause_s: float = 0.0,
) -> list[list[Any]]:
    """Send each message to all processes in turn; return each process's replies.

    Args:
        messages: one a round.
        pause_s: rest before each question, in which the threads of the one that has
            just answered stop spinning and go to sleep.
    """
    replies: list[list[Any]] = [[] for _ in processes]
    for message in messages:
        for process, heard in zip(processes, replies, strict=True):
            time.sleep(pause_s)
            heard.append(process.ask(**message))
    return replies
