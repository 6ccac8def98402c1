"""Encoding word by word gives the tokenizer's own ids, or is not done."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tokens.word_encoder import (
    _GAPS,
    _ODD_WORDS,
    _SUFFIXES,
    MAX_CACHED_LENGTH,
    WordEncoder,
    can_encode_by_word,
)
from tests.gateway.tokenizers import BY_WORDS, OTHERS, ids, trained

MORE = (
    "README",
    "don't",
    "x = f(y)\n\n",
    "  # why\n",
    "日本語",
    "\u2028",
    "\u0085",
    "\u1680",
    "ﬁ",
    "²",
)
texts = st.lists(st.sampled_from((*_ODD_WORDS, *_GAPS, *_SUFFIXES, *MORE)), max_size=30).map(
    "".join
)
by_words = pytest.mark.parametrize("name", BY_WORDS)


@by_words
@pytest.mark.parametrize("normalizer", ["", "NFC"])
def test_the_expressions_of_known_models_cut_where_we_do(name: str, normalizer: str) -> None:
    backend = trained(name, normalizer)
    assert can_encode_by_word(backend, partial(ids, backend))


@pytest.mark.parametrize("name", OTHERS)
def test_a_tokenizer_that_cuts_otherwise_is_found_out(name: str) -> None:
    backend = trained(name)
    assert not can_encode_by_word(backend, partial(ids, backend))


def test_a_tokenizer_that_changes_text_is_not_used_by_words() -> None:
    backend = trained("gpt2", "Lowercase")
    assert not can_encode_by_word(backend, partial(ids, backend))


def test_a_tokenizer_that_throws_dice_is_not_used_by_words() -> None:
    backend = trained("gpt2", "NFKC")
    backend.model.dropout = 0.5
    assert not can_encode_by_word(backend, partial(ids, backend))


@by_words
@settings(deadline=None, max_examples=300)
@given(text=texts | st.text(max_size=80))
def test_any_text_has_the_tokenizers_own_ids(name: str, text: str) -> None:
    backend = trained(name, "NFC")
    words = WordEncoder(partial(ids, backend))
    assert words.encode(text) == ids(backend, text) == words.encode(text)


def test_a_word_is_encoded_once() -> None:
    asked: list[str] = []

    def encode(word: str) -> list[int]:
        asked.append(word)
        return list(word.encode())

    words = WordEncoder(encode)
    assert words.encode("to be or not to be") == list(b"to be or not to be")
    assert words.encode("not to be") == list(b"not to be")
    assert asked == ["to", " be", " or", " not", " to", "not"]


def test_memory_is_bounded_and_words_in_use_stay() -> None:
    asked: list[str] = []

    def encode(word: str) -> list[int]:
        asked.append(word)
        return [len(word)]

    words = WordEncoder(encode, cached_words=100)
    for number in range(10_000):
        words.encode(f"often {number}")
        assert len(words) <= 200
    assert asked.count("often") == 1
    words.encode("x" * MAX_CACHED_LENGTH + "x")
    words.encode("x" * MAX_CACHED_LENGTH + "x")
    assert asked[-2:] == ["x" * MAX_CACHED_LENGTH + "x"] * 2
