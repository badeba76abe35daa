"""Text to train on: a file, a folder, or the source of Python's standard library.

The last is text that every machine has, so a first run needs no download. A file is
one document; of a folder, every file below it that holds UTF-8 text is one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from mpiscale.errors import InputError

PIECE_CHARACTERS = 1 << 20
NAMES_IN_REPORT = 3
ANY_SUFFIX = ""
# Installed packages differ by machine, tests hold text that is broken on purpose, and
# the last two are a quarter of the bytes, but tables of characters and manual pages.
NOT_STDLIB = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    | {"encodings", "pydoc_data"}
)
# Up to the last place where white space follows a character that is none.
WHOLE_WORDS = re.compile(r"(?s:.*)\S(?=[ \t\r\n])")

Reason = Literal[
    "hidden", "empty", "not UTF-8", "link to a folder", "not a regular file"
]


@dataclass(frozen=True)
class Document:
    """One file of UTF-8 text, read only when its pieces are asked for."""

    name: str  # relative to the corpus, with "/" on every system
    path: Path
    size: int  # bytes
    mtime_ns: int

    def pieces(self, characters: int = PIECE_CHARACTERS) -> Iterator[str]:
        """The text, in pieces of about `characters` that together are the whole.

        A piece ends where white space follows a word. No byte-level token spans such
        a place, so the pieces' tokens are the tokens of the whole. Text without any
        white space comes as one piece.
        """
        held = ""
        with self.path.open(encoding="utf-8", newline="") as file:
            while block := file.read(characters):
                held += block
                if whole := WHOLE_WORDS.match(held):
                    yield whole[0]
                    held = held[whole.end() :]
        if held:
            yield held


class Skipped(NamedTuple):
    """A file or folder that is no part of the corpus, and why."""

    name: str
    reason: Reason


@dataclass(frozen=True)
class Corpus:
    """Documents, sorted by name, and what was found beside them but left out."""

    place: str
    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...]

    @property
    def report(self) -> str:
        """One line: where, how many documents, how large, what was skipped and why."""
        count = len(self.documents)
        megabytes = sum(d.size for d in self.documents) / 1e6
        documents = "1 document" if count == 1 else f"{count} documents"
        text = f"{self.place}: {documents}, {megabytes:.3f} MB"
        return f"{text}; skipped {_listing(self.skipped)}" if self.skipped else text


def find_documents(source: Path | None) -> Corpus:
    """The documents at `source`; None means Python's standard library.

    Hidden, empty and binary files (those that are not UTF-8) are left out of a folder
    and listed in `Corpus.skipped`. Each file is read once, to see whether it is text.

    Raises:
        InputError: if there is nothing at `source`, it can't be read, or has no text.
    """
    found = _list_files(source)
    with _read_errors_named():
        is_text = [_is_utf8(document.path) for document in found.documents]
    pairs = list(zip(found.documents, is_text, strict=True))
    binary = [Skipped(d.name, "not UTF-8") for d, text in pairs if not text]
    skipped = tuple(sorted([*found.skipped, *binary]))
    documents = tuple(d for d, text in pairs if text)
    if not documents:
        raise InputError(
            f"no text in {found.place}: expected at least one file of UTF-8 text that "
            f"is neither empty nor hidden, got {_listing(skipped)}. "
            "Give a file of text or a folder that has one."
        )
    return Corpus(found.place, documents, skipped)


def corpus_digest(source: Path | None) -> str:
    """32 hex digits that change with the name, size or time of any file at `source`.

    Nothing is read: as `make` does, this trusts that a changed file has a new time.

    Raises:
        InputError: if there is nothing at `source`, or its folders can't be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for document in _list_files(source).documents:
        stamp = f"\0{document.size}\0{document.mtime_ns}\0"
        digest.update(os.fsencode(document.name) + stamp.encode())
    return digest.hexdigest()


def _list_files(source: Path | None) -> Corpus:
    """What is at `source` by name, type and size; no file is opened."""
    if source is None:
        stdlib = Path(sysconfig.get_path("stdlib"))
        place = f"the source of Python {platform.python_version()}'s standard library"
        return _list_folder(stdlib, f"{place} ({stdlib})", ".py", NOT_STDLIB)
    printable = str(source).encode("utf-8", "replace").decode()
    with _read_errors_named():
        if source.is_dir():
            return _list_folder(source, f"folder {printable}", ANY_SUFFIX, frozenset())
        if source.is_file():
            document = _document(source, source.parent)
            empty = (Skipped(source.name, "empty"),)
            place = f"file {printable}"
            if document.size:
                return Corpus(place, (document,), ())
            return Corpus(place, (), empty)
    raise InputError(
        f"no text at {printable}: there is no such file or folder, seen from "
        f"{Path.cwd()}. Give a file or folder of UTF-8 text, or none to train on the "
        "source of Python's standard library."
    )


def _list_folder(
    folder: Path, place: str, suffix: str, leave_out: frozenset[str]
) -> Corpus:
    documents, skipped = [], []
    with _read_errors_named():
        for path, reason in _walk(folder, leave_out):
            if not path.name.endswith(suffix):
                continue
            if reason is None:
                documents.append(_document(path, folder))
            else:
                skipped.append(Skipped(path.relative_to(folder).as_posix(), reason))
    documents.sort(key=lambda document: document.name)
    return Corpus(place, tuple(documents), tuple(sorted(skipped)))


def _walk(
    folder: Path, leave_out: frozenset[str]
) -> Iterator[tuple[Path, Reason | None]]:
    """Every file below `folder`, with the reason to skip it, or None to take it."""
    for path in folder.iterdir():
        if path.name in leave_out:
            continue
        reason = _reason_to_skip(path)
        if reason is None and path.is_dir():
            yield from _walk(path, leave_out)
        else:
            yield path, reason


def _reason_to_skip(path: Path) -> Reason | None:
    if path.name.startswith("."):
        return "hidden"
    if path.is_dir():  # a link may lead back up and round in circles
        return "link to a folder" if path.is_symlink() else None
    if not path.is_file():
        return "not a regular file"
    return None if path.stat().st_size else "empty"


def _document(path: Path, root: Path) -> Document:
    stat = path.stat()
    name = path.relative_to(root).as_posix()
    return Document(name, path, stat.st_size, stat.st_mtime_ns)


def _is_utf8(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while file.read(PIECE_CHARACTERS):
                pass
    except UnicodeDecodeError:
        return False
    return True


def _listing(skipped: tuple[Skipped, ...]) -> str:
    """As in "4 files: .git (hidden), a.png (not UTF-8), b (empty) and 1 more"."""
    if not skipped:
        return "no files"
    names = [f"{name} ({reason})" for name, reason in skipped[:NAMES_IN_REPORT]]
    more = len(skipped) - len(names)
    count = "1 file" if len(skipped) == 1 else f"{len(skipped)} files"
    return f"{count}: {', '.join(names)}" + (f" and {more} more" if more else "")


@contextmanager
def _read_errors_named() -> Iterator[None]:
    """Turn the system's refusal to read into an error that names the file."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot read {error.filename}: {error.strerror}. "
            "Make it readable, or give another file or folder of text."
        ) from error
