"""What is written is read again, unchanged; what is damaged is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import h5py
import numpy as np
import pytest

from mpiscale.data import token_writer
from mpiscale.data.batches import IGNORE, Batches
from mpiscale.data.token_file import Split, TokenFile, token_dtype
from mpiscale.data.token_writer import new_token_file
from mpiscale.data.tokenizer import ByteTokenizer
from mpiscale.errors import InputError

WriteTokens: TypeAlias = Callable[..., Path]  # a fixture of conftest.py


def read_all(path: Path) -> list[int]:
    with TokenFile(path) as file:
        return file.read("train", 0, file.length("train")).tolist()


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [
        (256, "uint8"),
        (257, "uint16"),
        (65536, "uint16"),
        (65537, "uint32"),
        (128000, "uint32"),
        (1 << 32, "uint32"),
    ],
)
def test_largest_id_of_each_vocabulary_is_stored_right(
    write_tokens: WriteTokens, vocabulary: int, dtype: str
) -> None:
    path = write_tokens({"train": [[1, vocabulary - 1]]}, vocabulary)
    assert read_all(path) == [1, vocabulary - 1, 0]
    with h5py.File(path) as file:
        assert file["train"].dtype == file.attrs["dtype"] == dtype


@pytest.mark.parametrize("vocabulary", [256, 65536, 65537, 128000])
def test_id_70000_is_stored_or_refused_but_never_wrapped(
    write_tokens: WriteTokens, vocabulary: int
) -> None:
    documents = {"train": [[70000]]}
    if vocabulary > 70000:
        assert read_all(write_tokens(documents, vocabulary)) == [70000, 0]
        return
    with pytest.raises(InputError) as error:
        write_tokens(documents, vocabulary)
    assert str(error.value) == (
        "token id 70000 in document train 0 is outside the vocabulary, expected "
        f"0 ... {vocabulary - 1}: use the tokenizer that made the ids."
    )


def test_vocabulary_above_32_bits_is_refused() -> None:
    with pytest.raises(InputError, match="needs ids of more than 32 bits"):
        token_dtype((1 << 32) + 1)


def test_document_with_the_separator_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        with new_token_file(tmp_path / "t.h5", ByteTokenizer(), "") as writer:
            ids = ByteTokenizer().encode("a\0b")
            writer.add_document("train", "core.dump", [ids])
    assert str(error.value) == (
        "document core.dump contains the token 0, which separates documents: is it "
        "binary? Remove the document or that character."
    )
    assert list(tmp_path.iterdir()) == []


def test_splits_starts_and_header_are_read_as_written(
    write_tokens: WriteTokens,
) -> None:
    path = write_tokens({"train": [[5, 6], [], [7]], "validation": [[8]]})
    with TokenFile(path) as file:
        assert file.read("train", 0, 6).tolist() == [5, 6, 0, 0, 7, 0]
        assert file.read("validation", 0, 2).tolist() == [8, 0]
        assert file.starts("train").tolist() == [0, 3, 4]
        assert file.starts("train").dtype == np.int64
        assert (file.vocabulary, file.separator) == (256, 0)
        assert (file.source, file.nbytes("train")) == ("numbers", 6)


def test_documents_larger_than_a_chunk_are_read_as_written(
    write_tokens: WriteTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_writer, "CHUNK", 7)
    lists = [[1 + i % 250 for i in range(n)] for n in (20, 3, 3, 3, 7, 40)]
    path = write_tokens({"train": lists})
    assert read_all(path) == [i for ids in lists for i in [*ids, 0]]


@pytest.mark.parametrize("chunk", [7, 1 << 16])
def test_tail_of_a_single_document_is_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(token_writer, "CHUNK", chunk)
    ids = np.arange(1, 200)
    with new_token_file(tmp_path / "t.h5", ByteTokenizer(), "") as writer:
        writer.add_document("train", "only", [ids[:90], ids[90:]])
        writer.hold_out_tail(0.05)
    with TokenFile(tmp_path / "t.h5") as file:
        assert file.read("train", 0, 1000).tolist() == list(range(1, 191))
        assert file.read("validation", 0, 1000).tolist() == [*range(191, 200), 0]
        assert file.starts("validation").tolist() == [0]


def test_digest_depends_on_tokens_and_not_on_pieces(tmp_path: Path) -> None:
    def digest(split: Split, pieces: list[list[int]], tail: float = 0.0) -> str:
        path = tmp_path / "t.h5"
        with new_token_file(path, ByteTokenizer(), "") as writer:
            writer.add_document(split, "a", map(np.array, pieces))
            if tail:
                writer.hold_out_tail(tail)
        with TokenFile(path) as file:
            return file.digest

    whole = digest("train", [[5, 6, 7]])
    assert digest("train", [[5], [6, 7]]) == whole
    others = {
        digest("train", [[5, 6, 8]]),
        digest("validation", [[5, 6, 7]]),
        digest("train", [[5, 6, 7]], tail=0.5),
    }
    assert len(others - {whole}) == 3


def test_reader_of_the_old_file_keeps_it_when_a_new_one_is_written(
    write_tokens: WriteTokens,
) -> None:
    path = write_tokens({"train": [list(range(1, 200))] * 2000})
    with TokenFile(path) as old:
        write_tokens({"train": [[9]]})
        assert old.read("train", 399_800, 399_803).tolist() == [1, 2, 3]
    assert read_all(path) == [9, 0]


def test_crash_before_the_rename_leaves_the_old_file(
    write_tokens: WriteTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tokens({"train": [[5]]})

    def crash(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write_tokens({"train": [[9]]})
    assert read_all(path) == [5, 0]
    assert list(path.parent.iterdir()) == [path]


def test_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"cannot write a token file in {tmp_path}/no"):
        with new_token_file(tmp_path / "no" / "t.h5", ByteTokenizer(), ""):
            pass


def test_four_processes_read_a_write_protected_file_at_once(
    write_tokens: WriteTokens,
) -> None:
    path = write_tokens({"train": [[5, 6]]})
    path.chmod(0o444)
    read = (
        "import sys; from pathlib import Path; "
        "from mpiscale.data.token_file import TokenFile; "
        "file = TokenFile(Path(sys.argv[1])); "
        "print(file.read('train', 0, 3).tolist(), flush=True); sys.stdin.read()"
    )
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", read, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for _ in range(4)
    ]
    try:  # each keeps its file open until its input ends, after all have answered
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "[5, 6, 0]\n"
    finally:
        for reader in readers:
            reader.communicate(timeout=30)
    assert [reader.returncode for reader in readers] == [0] * 4


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as error:
        TokenFile(path).read("train", 0, 3)
    return str(error.value)


def test_missing_truncated_and_foreign_files_are_refused(
    tmp_path: Path, write_tokens: WriteTokens
) -> None:
    path = tmp_path / "other.h5"
    assert refusal(path) == (
        f"no token file at {path}: run mpiscale.data.prepare first."
    )
    whole = write_tokens({"train": [list(range(1, 200))]}).read_bytes()
    remedy = "Delete it and prepare the data again."
    for content in (b"", b"some text", whole[:-100], whole[: len(whole) // 2]):
        path.write_bytes(content)
        assert refusal(path) == (
            f"{path} can't be used as a token file: it is truncated, or is not an "
            f"HDF5 file. {remedy}"
        )
    with h5py.File(path, "w"):
        pass
    assert refusal(path) == (
        f"{path} can't be used as a token file: expected the format "
        f"'mpiscale tokens', got None. {remedy}"
    )


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("version", 2, "expected version 1, got 2"),
        ("separator", 256, "its separator 256 is outside the vocabulary, 0 ... 255"),
        (
            "vocabulary",
            70000,
            "expected ids of type uint32 for a vocabulary of 70000, got uint8",
        ),
        (
            "dtype",
            "uint16",
            "expected ids of type uint8 for a vocabulary of 256, got uint16, uint8",
        ),
    ],
)
def test_header_that_contradicts_the_data_is_refused(
    write_tokens: WriteTokens, attribute: str, value: int | str, reason: str
) -> None:
    path = write_tokens({"train": [[5, 6]]})
    with h5py.File(path, "r+") as file:
        file.attrs[attribute] = value
    assert f"token file: {reason}. Delete it" in refusal(path)


def test_id_above_the_vocabulary_in_a_file_is_refused(
    write_tokens: WriteTokens,
) -> None:
    path = write_tokens({"train": [[5, 6]]}, vocabulary=100)
    with h5py.File(path, "r+") as file:
        file["train"][1] = 100
    assert refusal(path) == (
        f"token id 100 in {path} is outside the vocabulary, expected 0 ... 99: use "
        "the tokenizer that made the ids."
    )


@pytest.mark.parametrize("starts", [[1], [0, 0], [0, 3], [0, 2, 1], []])
def test_document_starts_that_do_not_ascend_are_refused(
    write_tokens: WriteTokens, starts: list[int]
) -> None:
    path = write_tokens({"train": [[5, 6]]})
    with h5py.File(path, "r+") as file:
        del file["train_starts"]
        file["train_starts"] = np.array(starts, dtype=np.int64)
    assert "starts of its train documents to ascend from 0 to below 3" in refusal(path)


def test_missing_dataset_is_named(write_tokens: WriteTokens) -> None:
    path = write_tokens({"train": [[5, 6]]})
    with h5py.File(path, "r+") as file:
        del file["train_starts"]
    assert "a part of it is missing" in refusal(path)
    assert "train_starts" in refusal(path)


def test_document_starts_above_2_to_the_31_are_kept(
    write_tokens: WriteTokens,
) -> None:
    path, border = write_tokens({"train": [[5, 6]]}), (1 << 31) + 4096
    with h5py.File(path, "r+") as file:
        file["train"].resize((border + (2 << 20),))  # no chunk is stored until written
        file["train"][border - 3 : border + 2] = [7, 8, 0, 9, 10]
        file["train_starts"].resize((2,))
        file["train_starts"][1] = border
    assert path.stat().st_size < 1 << 20
    with TokenFile(path) as token_file:
        assert token_file.starts("train").tolist() == [0, border]
        batches = Batches(token_file, "train", batch=1, length=1 << 20, seed=0)
        batch = next(
            batches(step)
            for step in range(batches.windows)
            if batches.window_indices(step) == border // (1 << 20)
        )
        place = border % (1 << 20)
        near = slice(place - 3, place + 2)
        assert batch.tokens[0, near].tolist() == [7, 8, 0, 9, 10]
        assert batch.labels[0, near].tolist() == [8, 0, IGNORE, 10, 0]
        assert batch.documents[0, near].tolist() == [0, 0, 0, 1, 1]
