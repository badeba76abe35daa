"""Which files become documents, which don't, and what is said about the rest."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from mpiscale.data.corpus import Skipped, corpus_digest, find_documents
from mpiscale.errors import InputError


def text_of(path: Path, characters: int) -> list[str]:
    (document,) = find_documents(path).documents
    return list(document.pieces(characters))


def test_standard_library_is_megabytes_of_sorted_source_without_tests() -> None:
    corpus = find_documents(None)
    names = [document.name for document in corpus.documents]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "encodings"}
    assert 5e6 < sum(document.size for document in corpus.documents) < 15e6


def test_file_is_one_document_and_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / ".hidden.txt"  # named by the user, so taken
    path.write_bytes("änd\r\nof line\n".encode())
    corpus = find_documents(path)
    assert [d.name for d in corpus.documents] == [".hidden.txt"]
    assert "".join(text_of(path, 1 << 20)) == "änd\r\nof line\n"
    assert corpus.report == f"file {path}: 1 document, 0.000 MB"


@pytest.mark.parametrize("characters", [1, 2, 3, 7, 1000])
def test_pieces_end_where_white_space_follows_a_word(
    tmp_path: Path, characters: int
) -> None:
    path = tmp_path / "a.txt"
    text = "one  two\r\n\tthree   \n\nfür fünf sechs-sieben \x1c\xa0acht"
    path.write_bytes(text.encode())
    pieces = text_of(path, characters)
    assert "".join(pieces) == text
    for before, after in pairwise(pieces):
        assert not before[-1].isspace() and after[0] in " \t\r\n"
    assert characters == 1000 or len(pieces) > 3


def test_folder_gives_sorted_text_files_and_lists_what_it_skips(
    tmp_path: Path,
) -> None:
    for name in ("b/2.txt", "b.txt", "a/z.md", ".git/config", "a/.swap"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("some text")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "photo.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    corpus = find_documents(tmp_path)
    assert [d.name for d in corpus.documents] == ["a/z.md", "b.txt", "b/2.txt"]
    assert corpus.skipped == (
        Skipped(".git", "hidden"),
        Skipped("a/.swap", "hidden"),
        Skipped("empty.txt", "empty"),
        Skipped("loop", "link to a folder"),
        Skipped("nowhere", "not a regular file"),
        Skipped("photo.png", "not UTF-8"),
    )
    assert corpus.report == (
        f"folder {tmp_path}: 3 documents, 0.000 MB; skipped 6 files: .git (hidden), "
        "a/.swap (hidden), empty.txt (empty) and 3 more"
    )


def test_missing_path_error_says_where_was_looked(tmp_path: Path) -> None:
    for find in (find_documents, corpus_digest):
        with pytest.raises(InputError) as error:
            find(Path("no/such.txt"))
        assert str(error.value) == (
            "no text at no/such.txt: there is no such file or folder, seen from "
            f"{Path.cwd()}. Give a file or folder of UTF-8 text, or none to train on "
            "the source of Python's standard library."
        )


@pytest.mark.parametrize(
    ("content", "found"), [(b"", "a.txt (empty)"), (b"\xff", "a.txt (not UTF-8)")]
)
def test_file_without_text_is_refused(
    tmp_path: Path, content: bytes, found: str
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    for place in ("file", "folder"):
        source = tmp_path / "a.txt" if place == "file" else tmp_path
        with pytest.raises(InputError) as error:
            find_documents(source)
        assert str(error.value) == (
            f"no text in {place} {source}: expected at least one file of UTF-8 text "
            f"that is neither empty nor hidden, got 1 file: {found}. "
            "Give a file of text or a folder that has one."
        )


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nor hidden, got no files\. Give a file"):
        find_documents(tmp_path)


def test_file_that_can_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    with pytest.raises(InputError) as error:
        find_documents(tmp_path)
    assert str(error.value) == (
        f"cannot read {path}: Permission denied. "
        "Make it readable, or give another file or folder of text."
    )


def test_digest_changes_with_name_size_and_time_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    os.utime(path, ns=(0, 5))
    digests = [corpus_digest(tmp_path)]
    assert corpus_digest(tmp_path) == corpus_digest(path) == digests[0]
    os.utime(path, ns=(0, 6))
    digests.append(corpus_digest(tmp_path))
    path.write_text("four")
    os.utime(path, ns=(0, 6))
    digests.append(corpus_digest(tmp_path))
    path.rename(tmp_path / "b.txt")
    digests.append(corpus_digest(tmp_path))
    assert len(set(digests)) == 4
