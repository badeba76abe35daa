"""Text becomes tokens and the same text again; wrong input is refused in words."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from mpiscale.data.corpus import find_documents
from mpiscale.data.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    make_tokenizer,
)
from mpiscale.errors import InputError

TEXTS = [
    "",
    "def f(x):\r\n\treturn x ** 2  \n\n",
    "Größer, 数学, 🙂 \u2028 e\u0301",
    "not a separator: <|endoftext|>",
]
TRAINED_ON = ["the cat sat on the mat with the other cat\n" * 3, *TEXTS]


@pytest.fixture(params=[256, 257, 280])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param > 256:
        pytest.importorskip("tokenizers")
    return make_tokenizer(request.param, TRAINED_ON)


def test_text_survives_the_round_trip(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        for given in (text, text.encode()):
            ids = tokenizer.encode(given)
            assert ids.dtype == np.int64 and ids.ndim == 1
            assert tokenizer.separator not in ids
            assert tokenizer.decode(ids) == text


def test_tokenizer_from_json_gives_the_same_tokens(tokenizer: Tokenizer) -> None:
    again = load_tokenizer(tokenizer.to_json())
    assert type(again) is type(tokenizer)
    assert again.vocabulary == tokenizer.vocabulary
    assert again.separator == tokenizer.separator
    for text in TEXTS:
        np.testing.assert_array_equal(again.encode(text), tokenizer.encode(text))


def test_broken_utf8_is_decoded_with_replacement_characters(
    tokenizer: Tokenizer,
) -> None:
    ids = tokenizer.encode("aé")[:-1]  # the second byte of é is its own token or gone
    assert tokenizer.decode(ids).startswith("a")
    everything = np.arange(tokenizer.vocabulary)
    assert "\ufffd" in tokenizer.decode(everything[::-1])


def test_id_outside_the_vocabulary_is_not_decoded(tokenizer: Tokenizer) -> None:
    last = tokenizer.vocabulary - 1
    for wrong in (-1, last + 1, 70000):
        with pytest.raises(InputError) as error:
            tokenizer.decode(np.array([last, wrong]))
        assert str(error.value) == (
            f"token id {wrong} in the ids to decode is outside the vocabulary, "
            f"expected 0 ... {last}: use the tokenizer that made the ids."
        )
    with pytest.raises(InputError, match="of type float64, expected integers"):
        tokenizer.decode(np.array([1.0]))


def test_byte_tokens_are_the_bytes_of_utf8() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert (tokenizer.vocabulary, tokenizer.separator) == (256, 0)


def test_frequent_pairs_become_one_token() -> None:
    pytest.importorskip("tokenizers")
    tokenizer = BpeTokenizer.train(280, TRAINED_ON)
    assert tokenizer.vocabulary == 280
    assert tokenizer.encode(" the cat").size < len(" the cat") / 2
    assert tokenizer.decode(np.array([tokenizer.separator])) == "<|endoftext|>"


def test_pieces_have_the_tokens_of_the_whole_text(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    text = "".join(TRAINED_ON) + "it's  \n\n   we'll\tsee \xa0 \x1c the end \x85 'tis "
    (tmp_path / "a.txt").write_bytes(text.encode())
    (document,) = find_documents(tmp_path).documents
    tokenizer = BpeTokenizer.train(300, [text])
    for characters in (1, 2, 5, 64):
        pieces = [tokenizer.encode(p) for p in document.pieces(characters)]
        np.testing.assert_array_equal(np.concatenate(pieces), tokenizer.encode(text))


@pytest.mark.parametrize("vocabulary", [-1, 0, 255])
def test_vocabulary_below_256_is_refused(vocabulary: int) -> None:
    with pytest.raises(InputError) as error:
        make_tokenizer(vocabulary)
    assert str(error.value) == (
        f"vocabulary {vocabulary} is too small, expected at least 256: one token for "
        "each byte. Use 256, or more for merged byte pairs."
    )


def test_vocabulary_that_the_text_does_not_reach_is_refused() -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(InputError) as error:
        make_tokenizer(5000, ["aaaa"])
    assert str(error.value) == (
        "the text gives 259 tokens, expected a vocabulary of 5000: every pair in it is "
        "merged already. Use a vocabulary of at most 259, or more text."
    )


def test_absent_library_error_gives_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError) as error:
        make_tokenizer(1000, ["text"])
    assert str(error.value) == (
        "a vocabulary above 256 needs the library `tokenizers`, which is not "
        "installed: run `pip install 'mpiscale[bpe]'`, or use a vocabulary of 256."
    )
    assert isinstance(make_tokenizer(256), ByteTokenizer)
