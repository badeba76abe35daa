"""From text to a token file, once: the result is kept in a cache folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mpiscale.backend import Array
from mpiscale.data.corpus import Corpus, Document, corpus_digest, find_documents
from mpiscale.data.token_file import VERSION, Split
from mpiscale.data.token_writer import new_token_file
from mpiscale.data.tokenizer import check_vocabulary, make_tokenizer
from mpiscale.errors import InputError
from mpiscale.rng import permutation

VALIDATION_FRACTION = 0.05
# Not the run's seed: runs with different seeds must not train on each other's
# validation documents.
SPLIT_SEED = 0


def prepare(
    source: Path | None, vocabulary: int, cache_dir: Path | None = None
) -> Path:
    """The token file for the text at `source`; made on the first call only.

    Args:
        source: a file or folder of text; None means Python's standard library.
        vocabulary: 256 for bytes, more for byte pairs trained on the text.
        cache_dir: where token files are kept; None means ~/.cache/mpiscale.

    Raises:
        InputError: if there is no text, no such tokenizer, or no place to write.
    """
    check_vocabulary(vocabulary)
    folder = cache_dir or Path.home() / ".cache" / "mpiscale"
    key = f"{VERSION} {corpus_digest(source)}"
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    path = folder / f"tokens-{vocabulary}-{digest}.h5"
    if not path.exists():
        _make_folder(folder)
        _write(find_documents(source), vocabulary, path)
    return path


def held_out(sizes: Sequence[int]) -> Array:
    """Which documents of the given sizes are for validation, [documents] bool.

    Goes through the documents in a fixed random order and takes each one that still
    fits in 5 % of the whole. If none does, takes the smallest.
    """
    room = VALIDATION_FRACTION * sum(sizes)
    chosen = np.zeros(len(sizes), dtype=bool)
    for document in permutation(len(sizes), SPLIT_SEED, "validation split"):
        if sizes[document] <= room:
            chosen[document] = True
            room -= sizes[document]
    if not chosen.any():
        chosen[np.argmin(sizes)] = True
    return chosen


def _write(corpus: Corpus, vocabulary: int, path: Path) -> None:
    documents = corpus.documents
    is_single = len(documents) == 1
    validation = [False] if is_single else held_out([d.size for d in documents])
    pairs = list(zip(documents, validation, strict=True))
    # The tokenizer must not learn from documents that it will be measured on; only a
    # single document, which is cut after it has tokens, is seen whole.
    tokenizer = make_tokenizer(vocabulary, _texts([d for d, held in pairs if not held]))
    with new_token_file(path, tokenizer, corpus.report) as writer:
        for document, held in pairs:
            split: Split = "validation" if held else "train"
            pieces = map(tokenizer.encode, document.pieces())
            writer.add_document(split, document.name, pieces)
        if is_single:
            writer.hold_out_tail(VALIDATION_FRACTION)


def _texts(documents: Sequence[Document]) -> Iterator[str]:
    for document in documents:
        yield from document.pieces()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the cache folder {folder}: {error.strerror}. "
            "Choose one that can be written with --cache DIR."
        ) from error
