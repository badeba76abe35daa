"""Text to token ids and back: one token a byte, or byte pairs merged by frequency.

Both work on bytes, so that every text has tokens and no token is unknown, and both
have one token that stands between documents.

Source: R. Sennrich, B. Haddow, A. Birch, "Neural machine translation of rare words
with subword units", ACL 2016; on bytes: A. Radford et al., "Language models are
unsupervised multitask learners" (GPT-2), 2019.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from mpiscale.backend import Array
from mpiscale.errors import InputError

BYTES = 256
BYTE_JSON = json.dumps({"type": "bytes"})
SEPARATOR_TEXT = "<|endoftext|>"


class Tokenizer(Protocol):
    """What training needs of a tokenizer; ids are 0 ... vocabulary - 1."""

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""

    @property
    def separator(self) -> int:
        """The token that follows every document and occurs in none."""

    def encode(self, text: str | bytes) -> Array:
        """The tokens of `text`, [n] int64."""

    def decode(self, ids: Array) -> str:
        """The text of ids [n]; bytes that are no UTF-8 become U+FFFD."""

    def to_json(self) -> str:
        """Text from which `load_tokenizer` builds this tokenizer again."""


class ByteTokenizer:
    """One token a byte of UTF-8; byte 0, which no text has, separates documents.

    Byte 0 in a prompt is taken as the separator; in a document it is refused, when
    the token file is written.
    """

    vocabulary = BYTES
    separator = 0

    def encode(self, text: str | bytes) -> Array:
        """The bytes of `text`, [n] int64."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Array) -> str:
        """The text of ids [n]; bytes that are no UTF-8 become U+FFFD."""
        check_ids(ids, self.vocabulary, "the ids to decode")
        return np.asarray(ids).astype(np.uint8).tobytes().decode(errors="replace")

    def to_json(self) -> str:
        """Text from which `load_tokenizer` builds this tokenizer again."""
        return BYTE_JSON


class BpeTokenizer:
    """Byte pairs merged by frequency: `BpeTokenizer.train`, or from its JSON."""

    def __init__(self, tokenizer_json: str) -> None:
        self._tokenizer = _tokenizers_library().Tokenizer.from_str(tokenizer_json)
        # The separator's text inside a document is text, not a separator.
        self._tokenizer.encode_special_tokens = True
        self.vocabulary: int = self._tokenizer.get_vocab_size()
        self.separator: int = self._tokenizer.token_to_id(SEPARATOR_TEXT)

    @classmethod
    def train(cls, vocabulary: int, texts: Iterable[str]) -> BpeTokenizer:
        """Merge the most frequent pairs of `texts` until there are `vocabulary` tokens.

        Raises:
            InputError: if `texts` have too few different pairs for that many tokens.
        """
        library = _tokenizers_library()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(
            add_prefix_space=False
        )
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[SEPARATOR_TEXT],
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        reached = tokenizer.get_vocab_size()
        if reached != vocabulary:
            raise InputError(
                f"the text gives {reached} tokens, expected a vocabulary of "
                f"{vocabulary}: every pair in it is merged already. "
                f"Use a vocabulary of at most {reached}, or more text."
            )
        return cls(tokenizer.to_str())

    def encode(self, text: str | bytes) -> Array:
        """The tokens of `text`, [n] int64; UnicodeDecodeError for bytes not UTF-8."""
        string = text if isinstance(text, str) else text.decode()
        encoding = self._tokenizer.encode(string, add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int64)

    def decode(self, ids: Array) -> str:
        """The text of ids [n]; bytes that are no UTF-8 become U+FFFD."""
        check_ids(ids, self.vocabulary, "the ids to decode")
        return self._tokenizer.decode(
            np.asarray(ids).tolist(), skip_special_tokens=False
        )

    def to_json(self) -> str:
        """The `tokenizers` library's own JSON, which other programs read too."""
        return self._tokenizer.to_str()


def make_tokenizer(vocabulary: int, texts: Iterable[str] = ()) -> Tokenizer:
    """Bytes for a vocabulary of 256; for a larger one byte pairs, trained on `texts`.

    Raises:
        InputError: if `vocabulary` is below 256, or above it and can't be trained.
    """
    check_vocabulary(vocabulary)
    if vocabulary == BYTES:
        return ByteTokenizer()
    return BpeTokenizer.train(vocabulary, texts)


def load_tokenizer(tokenizer_json: str) -> Tokenizer:
    """The tokenizer whose `to_json` gave this text."""
    if tokenizer_json == BYTE_JSON:
        return ByteTokenizer()
    return BpeTokenizer(tokenizer_json)


def check_vocabulary(vocabulary: int) -> None:
    """Raise InputError unless every byte can have a token of its own."""
    if vocabulary < BYTES:
        raise InputError(
            f"vocabulary {vocabulary} is too small, expected at least {BYTES}: one "
            f"token for each byte. Use {BYTES}, or more for merged byte pairs."
        )


def check_ids(ids: Array, vocabulary: int, what: str) -> None:
    """Raise InputError unless all of `ids` are integers in 0 ... vocabulary - 1."""
    ids = np.asarray(ids)
    if ids.size == 0:
        return
    if ids.dtype.kind not in "iu":
        raise InputError(f"{what} are of type {ids.dtype}, expected integers")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise InputError(
            f"token id {low if low < 0 else high} in {what} is outside the vocabulary, "
            f"expected 0 ... {vocabulary - 1}: use the tokenizer that made the ids."
        )


def _tokenizers_library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise InputError(
            "a vocabulary above 256 needs the library `tokenizers`, which is not "
            "installed: run `pip install 'mpiscale[bpe]'`, or use a vocabulary of 256."
        ) from error
    return tokenizers
