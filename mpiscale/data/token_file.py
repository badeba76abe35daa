"""Tokens in one HDF5 file: two splits, where their documents begin, and a header.

dataset                             holds
train, validation                   [n] token ids, the separator after every document
train_starts, validation_starts     [documents] int64, first token of each document
tokenizer                           JSON from which the tokenizer is built again

Ids have the smallest unsigned type for the vocabulary, which is written in the header:
16 bits for a vocabulary above 65,536 would turn rare tokens into others without any
error (huggingface/datatrove #118).
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import h5py
import numpy as np

from mpiscale.backend import Array, DType
from mpiscale.data.tokenizer import Tokenizer, check_ids, load_tokenizer
from mpiscale.errors import InputError

FORMAT = "mpiscale tokens"
VERSION = 1
LARGEST_VOCABULARY = 1 << 32

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)


def token_dtype(vocabulary: int) -> DType:
    """The smallest unsigned type that holds every id below `vocabulary`.

    Raises:
        InputError: if there are more ids than 32 bits can number.
    """
    if vocabulary > LARGEST_VOCABULARY:
        raise InputError(
            f"vocabulary {vocabulary} needs ids of more than 32 bits, expected at most "
            f"{LARGEST_VOCABULARY}: use a smaller vocabulary."
        )
    return np.min_scalar_type(vocabulary - 1)


def starts_name(split: Split) -> str:
    """Name of the dataset with the first token of each document of `split`."""
    return f"{split}_starts"


class TokenFile:
    """A token file, open for reading; any number of processes may open it at once.

    Attributes: `vocabulary`, `separator`, `source` (one line on the text and what was
    skipped in it) and `digest`, which is the same for the same tokens, so that ranks
    or a resumed run can see whether they train on the same data.

    Raises:
        InputError: if the file is missing, truncated, or not a token file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = self._open()
        try:
            self._check_format()
            self._datasets = {split: self._file[split] for split in SPLITS}
            attributes = self._file.attrs
            self.vocabulary = int(attributes["vocabulary"])
            self.separator = int(attributes["separator"])
            self.source = str(attributes["source"])
            self.digest = str(attributes["digest"])
            self._check_types()
            self._starts = {split: self._read_starts(split) for split in SPLITS}
        except (KeyError, OSError) as error:
            self.close()
            raise self._unusable(f"a part of it is missing ({error})") from error
        except InputError:
            self.close()
            raise

    def __enter__(self) -> TokenFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; nothing can be read after it."""
        self._file.close()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        return load_tokenizer(self._file["tokenizer"].asstr()[()])

    def length(self, split: Split) -> int:
        """Number of tokens in `split`, separators included."""
        return self._datasets[split].shape[0]

    def nbytes(self, split: Split) -> int:
        """Size of the tokens of `split` in memory, in bytes."""
        return self.length(split) * self._datasets[split].dtype.itemsize

    def starts(self, split: Split) -> Array:
        """First token of each document of `split`, [documents] int64, ascending."""
        return self._starts[split]

    def read(self, split: Split, begin: int, end: int) -> Array:
        """Tokens begin ... end - 1 of `split`, in the file's unsigned type.

        Raises:
            InputError: if they can't be read, or are not below the vocabulary.
        """
        try:
            ids = self._datasets[split][begin:end]
        except OSError as error:
            raise self._unusable(f"its {split} tokens cannot be read") from error
        check_ids(ids, self.vocabulary, f"{self.path}")
        return ids

    def _open(self) -> Any:
        if not self.path.is_file():
            raise InputError(
                f"no token file at {self.path}: run mpiscale.data.prepare first."
            )
        try:
            # Never written again once it has its name: needs no lock, which some file
            # systems of clusters refuse.
            return h5py.File(self.path, "r", locking=False)
        except OSError as error:
            reason = "it is truncated, or is not an HDF5 file"
            raise self._unusable(reason) from error

    def _check_format(self) -> None:
        found = self._file.attrs.get("format")
        if found != FORMAT:
            raise self._unusable(f"expected the format {FORMAT!r}, got {found!r}")
        version = int(self._file.attrs["version"])
        if version != VERSION:
            raise self._unusable(f"expected version {VERSION}, got {version}")

    def _check_types(self) -> None:
        named = str(self._file.attrs["dtype"])
        types = {named, *(tokens.dtype.name for tokens in self._datasets.values())}
        expected = token_dtype(self.vocabulary).name
        if types != {expected}:
            raise self._unusable(
                f"expected ids of type {expected} for a vocabulary of "
                f"{self.vocabulary}, got {', '.join(sorted(types))}"
            )
        if not 0 <= self.separator < self.vocabulary:
            raise self._unusable(
                f"its separator {self.separator} is outside the vocabulary, "
                f"0 ... {self.vocabulary - 1}"
            )

    def _read_starts(self, split: Split) -> Array:
        starts = self._file[starts_name(split)][:]
        tokens = self.length(split)
        borders = np.append(starts, tokens)  # each document has at least a separator
        ascends = borders[0] == 0 and bool((np.diff(borders) > 0).all())
        if starts.dtype != np.int64 or not ascends:
            raise self._unusable(
                f"expected the starts of its {split} documents to ascend from 0 to "
                f"below {tokens}, as int64"
            )
        return starts

    def _unusable(self, reason: str) -> InputError:
        return InputError(
            f"{self.path} can't be used as a token file: {reason}. "
            "Delete it and prepare the data again."
        )
