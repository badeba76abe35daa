"""Text is prepared once, and the same documents are held out every time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mpiscale.data import prepare as prepare_module
from mpiscale.data.corpus import Document, find_documents
from mpiscale.data.prepare import held_out, prepare
from mpiscale.data.token_file import SPLITS, TokenFile
from mpiscale.data.tokenizer import BpeTokenizer
from mpiscale.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i:02}.txt").write_text(f"document number {i}: größer {i * i}\n")
    return folder


def documents_in(path: Path) -> dict[str, list[str]]:
    with TokenFile(path) as file:
        tokenizer = file.tokenizer()
        texts = {}
        for split in SPLITS:
            ids = file.read(split, 0, file.length(split))
            assert ids[-1] == file.separator
            pieces = np.split(ids, file.starts(split)[1:])
            assert all(piece[-1] == file.separator for piece in pieces)
            texts[str(split)] = [tokenizer.decode(piece[:-1]) for piece in pieces]
        return texts


@pytest.mark.parametrize("vocabulary", [256, 300])
def test_every_document_is_whole_in_one_split(
    folder: Path, tmp_path: Path, vocabulary: int
) -> None:
    if vocabulary > 256:
        pytest.importorskip("tokenizers")
    texts = documents_in(prepare(folder, vocabulary, tmp_path / "cache"))
    written = [path.read_text() for path in sorted(folder.iterdir())]
    assert sorted(texts["train"] + texts["validation"]) == sorted(written)
    assert len(texts["validation"]) in (2, 3)  # 5 % of 60
    chosen = held_out([path.stat().st_size for path in sorted(folder.iterdir())])
    assert texts["validation"] == [t for t, c in zip(written, chosen, strict=True) if c]


def test_second_call_neither_reads_nor_writes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prepare(folder, 256, tmp_path / "cache")
    before = path.stat()

    def read(*args: object) -> None:
        raise AssertionError("the text was read again")

    monkeypatch.setattr(prepare_module, "find_documents", read)
    assert prepare(folder, 256, tmp_path / "cache") == path
    assert path.stat() == before


def test_changed_text_or_vocabulary_is_another_file(
    folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tokenizers")
    cache = tmp_path / "cache"
    paths = {prepare(folder, 256, cache), prepare(folder, 300, cache)}
    (folder / "new.txt").write_text("a new document")
    paths.add(prepare(folder, 256, cache))
    assert len(paths) == 3


def test_default_cache_is_below_the_home_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert prepare(folder, 256).parent == tmp_path / ".cache" / "mpiscale"


def test_single_document_is_cut_at_95_percent(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789" * 100 + "\n")
    path = prepare(tmp_path / "a.txt", 256, tmp_path / "cache")
    with TokenFile(path) as file:
        lengths = [file.length(split) for split in SPLITS]
        assert lengths == [951, 51]  # of 1001 bytes and the separator
        assert file.read("validation", 0, 3).tobytes() == b"123"


def test_standard_library_is_prepared_in_seconds(tmp_path: Path) -> None:
    begin = time.perf_counter()
    path = prepare(None, 256, tmp_path)
    assert time.perf_counter() - begin < 20
    with TokenFile(path) as file:
        total = sum(file.length(split) for split in SPLITS)
        expected = sum(d.size + 1 for d in find_documents(None).documents)
        assert total == expected
        assert file.length("validation") == pytest.approx(0.05 * total, rel=0.02)
        assert "standard library" in file.source


def test_skipped_files_are_reported_in_the_file(folder: Path, tmp_path: Path) -> None:
    (folder / "photo.png").write_bytes(b"\x89PNG\xff")
    with TokenFile(prepare(folder, 256, tmp_path / "cache")) as file:
        assert file.source == (
            f"folder {folder}: 60 documents, 0.002 MB; "
            "skipped 1 file: photo.png (not UTF-8)"
        )


def test_tokenizer_learns_from_train_documents_only(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    trained_on: list[str] = []
    train = BpeTokenizer.train

    def listen(vocabulary: int, texts: Iterator[str]) -> BpeTokenizer:
        trained_on.extend(texts)
        return train(vocabulary, trained_on)

    monkeypatch.setattr(BpeTokenizer, "train", listen)
    texts = documents_in(prepare(folder, 300, tmp_path / "cache"))
    heard = "".join(trained_on)
    assert all(text in heard for text in texts["train"])
    assert not any(text in heard for text in texts["validation"])


def test_long_tokenizer_json_fits_the_file(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    stdlib = next(iter(find_documents(None).documents)).path.parent
    path = prepare(stdlib / "asyncio", 4000, tmp_path)
    with TokenFile(path) as file:
        assert len(file.tokenizer().to_json()) > 1 << 16  # the limit of an attribute
        assert file.vocabulary == 4000


def test_held_out_documents_are_five_percent_whatever_their_sizes() -> None:
    for count in (40, 1000):
        sizes = np.random.default_rng(count).integers(1, 1000, count)
        chosen = held_out(sizes.tolist())
        assert 0.04 < sizes[chosen].sum() / sizes.sum() <= 0.05
    assert held_out([50, 40, 60]).tolist() == [False, True, False]
    assert held_out([1000, 10]).tolist() == [False, True]


def test_held_out_documents_do_not_change() -> None:
    assert np.flatnonzero(held_out([10] * 100)).tolist() == [7, 24, 50, 94, 96]


def test_document_with_byte_zero_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "zero.txt").write_bytes(b"a\0b")
    with pytest.raises(InputError, match=r"document zero\.txt contains the token 0"):
        prepare(folder, 256, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_folder_that_can_not_be_made_is_named(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError) as error:
        prepare(folder, 256, tmp_path / "file" / "cache")
    assert str(error.value) == (
        f"cannot make the cache folder {tmp_path}/file/cache: Not a directory. "
        "Choose one that can be written with --cache DIR."
    )


def test_wrong_vocabulary_is_refused_before_any_text_is_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="vocabulary 10 is too small"):
        prepare(tmp_path / "missing", 10, tmp_path)


def test_large_documents_are_encoded_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 1000)
    pieces = Document.pieces
    monkeypatch.setattr(Document, "pieces", lambda self: pieces(self, 100))
    path = prepare(tmp_path / "a.txt", 256, tmp_path / "cache")
    with TokenFile(path) as file:
        text = b"".join(file.read(s, 0, 1 << 20).tobytes() for s in SPLITS)
    assert text == b"some words\n" * 1000 + b"\0"
