"""Prompts of real text, and a tokenizer with about 4 bytes per token, as those of models have."""

import json
import sysconfig
from array import array
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
CODE_CHARACTERS = 16_000_000
AT_ONCE = 1_000_000


def source_text() -> str:
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return "\n".join(file.read_text() for file in files)


def source_code() -> str:
    """Python's standard library: every passage has words that no earlier one had."""
    code = ""
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if len(code) < CODE_CHARACTERS and "site-packages" not in file.parts:
            code += file.read_text(errors="ignore")
    return code


def build_tokenizer(folder: Path) -> Path:
    """Trains a tokenizer on the project's documentation."""
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
    # Written without transformers, which would import torch.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "chat_template": PLAIN,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def passages(folder: Path, tokens: int, text: str, step: int) -> Iterator[str]:
    """Different passages of the text, each of `tokens` tokens including the chat template. They start
    `step` tokens apart."""
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = array("i")
    for at in range(0, len(text), AT_ONCE):  # encoding 16 MB at once would take a gigabyte
        encoded.extend(backend.encode(text[at : at + AT_ONCE]).ids)
    template = len(backend.encode("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n").ids)
    for number in count():
        name = f"{number}: "
        length = tokens - template - len(backend.encode(name).ids)
        start = number * step % (len(encoded) - length)
        yield name + backend.decode(encoded[start : start + length].tolist())
