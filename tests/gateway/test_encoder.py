"""Text to ids, remembered by pieces and by words: always the tokenizer's own ids."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tokens import encoder as encoder_module
from gateway.tokens.encoder import Encoder
from gateway.tokens.word_encoder import _GAPS, _ODD_WORDS
from tests.gateway.tokenizers import BY_WORDS, MARKERS, OTHERS, STRIPPING, WORD, ids, trained

ADDED = (*MARKERS, STRIPPING, WORD)
texts = st.lists(st.sampled_from((*_ODD_WORDS, *_GAPS, *ADDED, *ADDED)), max_size=30).map("".join)
names = pytest.mark.parametrize("name", [*BY_WORDS, *OTHERS])


@cache
def encoder_of(name: str) -> Encoder:
    return Encoder(trained(name, added=True))


@names
@settings(deadline=None, max_examples=150)
@given(text=texts)
def test_added_tokens_and_odd_text_have_the_tokenizers_own_ids(name: str, text: str) -> None:
    backend = trained(name, added=True)
    encoder = encoder_of(name)
    assert encoder.encode(text) == ids(backend, text) == encoder.encode(text)


def test_a_tokenizer_that_does_not_fit_is_asked_every_new_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoder_module, "WordEncoder", None)
    backend = trained("words take spaces along")
    text = "to be or  not\n\nto be<|im_end|>\n"
    assert Encoder(backend).encode(text) == ids(backend, text)


def test_without_special_tokens_whole_texts_are_remembered() -> None:
    backend = trained("gpt2", markers=False)
    encoder = Encoder(backend)
    for _ in range(2):
        encoder.encode("to be or not to be").clear()
        assert encoder.encode("to be or not to be") == ids(backend, "to be or not to be")


def test_ids_that_were_given_are_the_callers_to_change() -> None:
    encoder = Encoder(trained("gpt2"))
    text = "some words that are long enough to be remembered"
    encoder.encode(text).clear()
    assert encoder.encode(text) == ids(trained("gpt2"), text)
