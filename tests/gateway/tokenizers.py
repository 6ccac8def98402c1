"""Tokenizers like those of well-known models: their expressions, on a small vocabulary."""

from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Sequence, Split
from tokenizers.trainers import BpeTrainer

from gateway.tokens.word_encoder import _odd_texts

MARKERS = ["<|im_start|>", "<|im_end|>"]
STRIPPING = "<mask>"
"""An added token that takes the spaces before it along."""
WORD = "<think>"
"""An added token that is no special one."""
_SHORT_FORMS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
QWEN = (
    rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS}"
)
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT_FORMS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT_FORMS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
)
DEEPSEEK = (
    rf"{_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_ENDS}"
)


def _split(*expressions: str) -> Sequence:
    parts = [Split(Regex(expression), "isolated") for expression in expressions]
    return Sequence([*parts, ByteLevel(add_prefix_space=False, use_regex=False)])


BY_WORDS: dict[str, Any] = {
    "gpt2": ByteLevel(add_prefix_space=False),
    "qwen": _split(QWEN),
    "llama": _split(LLAMA),
    "gpt-4o": _split(GPT_4O),
    "deepseek": _split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK),
    "digits": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
}
OTHERS: dict[str, Any] = {
    "adds a space": ByteLevel(add_prefix_space=True),
    "words take spaces along": _split(r"\w+\s*|\W+"),
    "line breaks stay with words": _split(r"\w+[\r\n]*|\s?[^\w\s]+|\s+"),
    "no expression": ByteLevel(add_prefix_space=False, use_regex=False),
    "metaspace": Metaspace(),
}


@cache
def trained(
    name: str, normalizer: str = "", added: bool = False, markers: bool = True
) -> Tokenizer:
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = (BY_WORDS | OTHERS)[name]
    if normalizer:
        backend.normalizer = getattr(normalizers, normalizer)()
    trainer = BpeTrainer(
        vocab_size=3_000,
        special_tokens=MARKERS if markers else [],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(list(_odd_texts()), trainer)
    if added:
        backend.add_special_tokens([AddedToken(STRIPPING, lstrip=True, special=True)])
        backend.add_tokens([AddedToken(WORD, normalized=False)])
    return backend


def ids(backend: Tokenizer, text: str) -> list[int]:
    """What the tokenizer itself says."""
    found: list[int] = backend.encode(text, add_special_tokens=False).ids
    return found
