"""Compiled kernels on disk, shared by all ranks: one rank compiles, the others wait.

Numba's own cache does not fit three needs of parallel runs. It ignores edits of
functions in other files that a kernel calls: here the folder's name holds a hash of
all kernel sources. Its index of a function's variants is read, changed and written
without a lock, so that two processes can give two variants one file: here the file's
name follows from the variant alone. And it lets every rank compile the same kernel at
the same time: here the first takes a lock.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import pickle
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import llvmlite.binding
import numba
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from mpiscale.kernels.choose import cache_base

SOURCES = Path(__file__).parent
PATIENCE_S = 60.0  # a rank that waited this long for another's compilation does it too


def kernel_cache_folder(base: Path) -> Path:
    """base/mpiscale/kernels-<hash>, made if missing; a temporary one if that fails."""
    folder = base / "mpiscale" / f"kernels-{_hash_of_kernels()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        temporary = tempfile.mkdtemp(prefix="mpiscale-kernels-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        warnings.warn(
            f"cannot keep compiled kernels in {folder} ({error}), so they go to "
            f"{temporary} and are compiled anew in every run: set XDG_CACHE_HOME to a "
            "folder that can be written",
            stacklevel=2,
        )
        return Path(temporary)


@functools.cache
def _folder() -> Path:
    return kernel_cache_folder(cache_base())


@functools.cache
def _hash_of_kernels() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(SOURCES.rglob("*.py")):
        digest.update(path.read_bytes())
    cpu = llvmlite.binding.get_host_cpu_name()
    digest.update(f"{numba.__version__} {sys.version_info[:2]} {cpu}".encode())
    return digest.hexdigest()


class SharedCache(_Cache):  # type: ignore[misc]  # Numba does not type it
    """What Numba's dispatcher asks before it compiles, and tells afterwards."""

    def __init__(self, function: Callable[..., Any], variant: str = "") -> None:
        self._name = function.__name__
        self._key = (function.__module__, function.__qualname__, variant)
        self._turns: dict[Path, IO[bytes]] = {}

    @property
    def cache_path(self) -> str:
        """The folder, as Numba asks for it."""
        return str(_folder())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kernel compiled for `sig`, or None: then this process is to compile it.

        Waits while another process compiles it. A caller is locked before its callees
        and calls have no cycles, so no two processes wait for each other.
        """
        target_context.refresh()
        path = self._path(sig, target_context.codegen())
        content = _read(path)
        if content is None:
            if path not in self._turns:  # there if an earlier compilation failed
                self._turns[path] = _take_turn(path.with_suffix(".lock"))
            content = _read(path)  # another process may have written it meanwhile
        if content is None:
            return None
        self._end_turn(path)
        return CompileResult._rebuild(target_context, *pickle.loads(content))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the compiled kernel `data`; readers see the whole file or none."""
        path = self._path(sig, data.codegen)
        try:
            if not data.library.has_dynamic_globals:  # such code holds addresses
                _write(path, dumps(data._reduce()))
        except OSError as error:
            warnings.warn(f"cannot keep {self._name} in {path}: {error}", stacklevel=2)
        finally:
            self._end_turn(path)

    def enable(self) -> None:
        """Nothing to do: the cache is always on."""

    def disable(self) -> None:
        """Nothing to do: a caller who wants no cache makes no SharedCache."""

    def flush(self) -> None:
        """Nothing to do: an edited source gives another folder."""

    def _path(self, sig: Any, codegen: Any) -> Path:
        key = repr((self._key, str(sig), codegen.magic_tuple()))
        digest = hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
        return _folder() / f"{self._name}-{digest}.nbc"

    def _end_turn(self, path: Path) -> None:
        if turn := self._turns.pop(path, None):
            turn.close()  # and with it the lock


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _write(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _take_turn(path: Path) -> IO[bytes]:
    """Lock the file; give up, unlocked, where the file system has no locks."""
    file = path.open("wb")
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            break
    return file
