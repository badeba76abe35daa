"""Small token files, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from mpiscale.backend import Array
from mpiscale.data.token_file import Split
from mpiscale.data.token_writer import new_token_file

Documents: TypeAlias = dict[Split, list[Sequence[int]]]
WriteTokens: TypeAlias = Callable[..., Path]


class Numbers:
    """A tokenizer of any vocabulary whose text is decimal numbers."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary, self.separator = vocabulary, 0

    def encode(self, text: str | bytes) -> Array:
        return np.array([int(word) for word in text.split()])

    def decode(self, ids: Array) -> str:
        return " ".join(str(i) for i in ids)

    def to_json(self) -> str:
        return f'{{"numbers": {self.vocabulary}}}'


@pytest.fixture
def write_tokens(tmp_path: Path) -> WriteTokens:
    """write_tokens({"train": [[5, 6], [7]]}) -> path of a file with 5 6 0 7 0."""

    def write(
        documents: Documents, vocabulary: int = 256, name: str = "tokens.h5"
    ) -> Path:
        path = tmp_path / name
        with new_token_file(path, Numbers(vocabulary), "numbers") as writer:
            for split, lists in documents.items():
                for i, ids in enumerate(lists):
                    writer.add_document(split, f"{split} {i}", [np.array(ids)])
        return path

    return write
