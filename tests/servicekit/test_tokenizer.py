"""A tokenizer is known again by what gateways write into Steps."""

import json
from pathlib import Path

import pytest

from gateway.tokens.renderer import Renderer
from servicekit.errors import Fatal
from servicekit.tokenizer import TokenizerFolder
from tests.tiny_model import build_tokenizer


def test_a_tokenizer_is_known_as_the_gateway_loads_it(tmp_path: Path) -> None:
    """Beside a Qwen model, transformers lets it bring text into NFC, which its file does not say."""
    plain = build_tokenizer(tmp_path / "plain")
    beside = build_tokenizer(tmp_path / "beside")
    (beside / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    recorded = Renderer.load(str(beside)).fingerprint
    assert recorded != Renderer.load(str(plain)).fingerprint
    TokenizerFolder(str(beside)).check(recorded)
    TokenizerFolder(str(beside)).check("")
    with pytest.raises(Fatal, match=rf"the Steps were recorded with {recorded}"):
        TokenizerFolder(str(plain)).check(recorded)


def test_a_file_that_holds_no_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(Fatal, match=r"tokenizer.json contains no tokenizer"):
        TokenizerFolder(str(tmp_path)).check("0123456789abcdef")
