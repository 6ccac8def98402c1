"""Prompts of real text, and a tokenizer that splits them as a model's would: about 4 bytes a token."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from tests.tiny_model import PLAIN

ROOT = Path(__file__).parents[2]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
VOCABULARY = 4_000


def source_text() -> str:
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return "\n".join(file.read_text() for file in files)


def build_tokenizer(folder: Path) -> Path:
    """Trained on the project's own documentation."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([source_text()], trainer)
    backend.save(str(folder / "tokenizer.json"))
    # Written by hand: transformers would load torch for it.
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "chat_template": PLAIN,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def passages(folder: Path, tokens: int) -> Iterator[str]:
    """Different pieces of the text, each of so many tokens with the template around it."""
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = backend.encode(source_text()).ids
    template = len(backend.encode("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n").ids)
    for number in count():
        name = f"{number}: "
        length = tokens - template - len(backend.encode(name).ids)
        start = number * 37 % (len(encoded) - length)
        yield name + backend.decode(encoded[start : start + length])
