"""Writes a token file piece by piece; it takes its name only when it is complete.

HDF5 empties a file that it opens for writing even when another process reads it and
the opening fails. So the tokens go to a name of their own in the same folder, and the
finished file replaces the old one in one step: who reads the old one goes on doing so.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpiscale.backend import Array, DType
from mpiscale.data.token_file import (
    FORMAT,
    SPLITS,
    VERSION,
    Split,
    starts_name,
    token_dtype,
)
from mpiscale.data.tokenizer import Tokenizer, check_ids
from mpiscale.errors import InputError

CHUNK = 1 << 16  # elements


class GrowingDataset:
    """A 1-D dataset at whose end arrays are appended, written in whole chunks."""

    def __init__(self, file: Any, name: str, dtype: DType) -> None:
        self._dataset = file.create_dataset(
            name, (0,), dtype, chunks=(CHUNK,), maxshape=(None,)
        )
        self._waiting: list[Array] = []
        self._written = 0
        self.size = 0

    def append(self, values: Array) -> None:
        """Add values [n], which the dataset's type must be able to hold."""
        self._waiting.append(values)
        self.size += values.size
        if self.size - self._written >= CHUNK:
            self.flush()

    def flush(self) -> None:
        """Write what waits in memory."""
        if self.size > self._written:
            self._dataset.resize((self.size,))
            self._dataset[self._written :] = np.concatenate(self._waiting)
            self._waiting, self._written = [], self.size

    def move_tail(self, begin: int, to: GrowingDataset) -> None:
        """Move the elements from `begin` on to the end of another dataset."""
        self.flush()
        for block in range(begin, self.size, CHUNK):
            to.append(self._dataset[block : block + CHUNK])
        self._dataset.resize((begin,))
        self.size = self._written = begin


class TokenWriter:
    """Appends documents to the two splits of an open token file."""

    def __init__(self, file: Any, tokenizer: Tokenizer, source: str) -> None:
        self._file, self._tokenizer = file, tokenizer
        self._dtype = token_dtype(tokenizer.vocabulary)
        self._tokens = {s: GrowingDataset(file, s, self._dtype) for s in SPLITS}
        self._starts = {
            s: GrowingDataset(file, starts_name(s), np.dtype(np.int64)) for s in SPLITS
        }
        self._digest = hashlib.blake2b(tokenizer.to_json().encode(), digest_size=16)
        file["tokenizer"] = tokenizer.to_json()  # too long for an attribute: 64 kB
        file.attrs["vocabulary"] = tokenizer.vocabulary
        file.attrs["separator"] = tokenizer.separator
        file.attrs["dtype"] = self._dtype.name
        file.attrs["source"] = source

    def add_document(self, split: Split, name: str, pieces: Iterable[Array]) -> None:
        """Append one document, given as pieces of ids [n], and the separator.

        Raises:
            InputError: if an id is outside the vocabulary or is the separator's.
        """
        self._starts[split].append(np.array([self._tokens[split].size]))
        self._digest.update(split.encode())
        separator = self._tokenizer.separator
        for ids in pieces:
            check_ids(ids, self._tokenizer.vocabulary, f"document {name}")
            if (ids == separator).any():
                raise InputError(
                    f"document {name} contains the token {separator}, which separates "
                    "documents: is it binary? Remove the document or that character."
                )
            self._append(split, ids)
        self._append(split, np.array([separator]))

    def hold_out_tail(self, fraction: float) -> None:
        """Move the last `fraction` of the only document from train to validation."""
        train, validation = self._tokens["train"], self._tokens["validation"]
        begin = int(train.size * (1 - fraction))
        self._digest.update(f"tail {begin}".encode())
        train.move_tail(begin, validation)
        self._starts["validation"].append(np.array([0]))

    def finish(self) -> None:
        """Write what waits in memory, then the attributes that mark a whole file."""
        for dataset in [*self._tokens.values(), *self._starts.values()]:
            dataset.flush()
        self._file.attrs["digest"] = self._digest.hexdigest()
        self._file.attrs["version"] = VERSION
        self._file.attrs["format"] = FORMAT

    def _append(self, split: Split, ids: Array) -> None:
        stored = ids.astype(self._dtype)  # checked: nothing wraps
        self._digest.update(stored.tobytes())
        self._tokens[split].append(stored)


@contextmanager
def new_token_file(
    path: Path, tokenizer: Tokenizer, source: str
) -> Iterator[TokenWriter]:
    """A writer whose file becomes `path` when the block ends without an error."""
    partial = path.with_name(f".{uuid.uuid4().hex}.partial")
    try:
        with _create(partial) as file:
            writer = TokenWriter(file, tokenizer, source)
            yield writer
            writer.finish()
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _create(path: Path) -> Any:
    try:
        # The name is this writer's alone; some file systems of clusters have no locks.
        return h5py.File(path, "x", locking=False)
    except OSError as error:
        raise InputError(
            f"cannot write a token file in {path.parent}: {error}. "
            "Choose a folder that can be written."
        ) from error
