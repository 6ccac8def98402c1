"""A tokenizer and a model that are made on the spot, because tests may not download any.

A byte is a token and its id is its value, so a test knows the ids of a text without asking
(`list(text.encode())`), and any text survives encoding and decoding. The markers of turns, reasoning
and tool calls are single tokens above the bytes.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import processes

if TYPE_CHECKING:
    import tokenizers

MARKERS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
IDS = {text: 256 + place for place, text in enumerate(MARKERS + WORDS)}
EOS = IDS["<|im_end|>"]
SEED = 20

_TOOLS = r"""
{%- if tools %}
{{- "<|im_start|>system\n" }}
{%- if messages[0].role == "system" %}{{- messages[0].content + "\n\n" }}{% endif %}
{{- "# Tools\n" }}
{%- for tool in tools %}{{- "\n" + tool | tojson }}{% endfor %}
{{- "<|im_end|>\n" }}
{%- elif messages[0].role == "system" %}
{{- "<|im_start|>system\n" + messages[0].content + "<|im_end|>\n" }}
{%- endif %}
"""

_TOOL_ANSWER = r"""
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- "<|im_start|>user" }}{% endif %}
{{- "\n<tool_response>\n" + message.content + "\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- "<|im_end|>\n" }}{% endif %}
"""

_PROMPT = r"""
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n" }}{% endif %}
"""

# Every turn is written the same way wherever it stands, so a longer conversation only appends.
PLAIN = (
    _TOOLS
    + r"""
{%- for message in messages %}
{%- set content = message.content or "" %}
{%- if message.role == "assistant" %}
{{- "<|im_start|>assistant\n" }}
{%- if message.reasoning_content %}
{{- "<think>" + message.reasoning_content + "</think>" }}
{%- endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{%- set arguments = call.function.arguments %}
{%- if arguments is not string %}{% set arguments = arguments | tojson %}{% endif %}
{%- if content or not loop.first %}{{- "\n" }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + arguments }}
{{- "}\n</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\n" }}
{%- elif message.role == "tool" %}
"""
    + _TOOL_ANSWER
    + r"""
{%- elif message.role == "user" or not loop.first %}
{{- "<|im_start|>" + message.role + "\n" + content + "<|im_end|>\n" }}
{%- endif %}
{%- endfor %}
"""
    + _PROMPT
)

# What came before the last question loses its reasoning, and tool calls are spelled anew: with this
# template the ids that the model sampled are not the ids that the next prompt has in their place.
STRIPPING = (
    _TOOLS
    + r"""
{%- set last = namespace(question=0) %}
{%- for message in messages %}
{%- if message.role == "user" %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content or "" %}
{%- if message.role == "assistant" %}
{%- set reasoning = message.reasoning_content or "" %}
{%- if "</think>" in content %}
{%- set reasoning = content.split("</think>")[0].split("<think>")[-1] %}
{%- set content = content.split("</think>")[-1].lstrip("\n") %}
{%- endif %}
{{- "<|im_start|>assistant\n" }}
{%- if reasoning and loop.index0 > last.question %}
{{- "<think>\n" + reasoning.strip("\n") + "\n</think>\n\n" }}
{%- endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{%- set arguments = call.function.arguments %}
{%- if arguments is not string %}
{%- set arguments = arguments | tojson(separators=(" , ", " : ")) %}
{%- endif %}
{%- if content or not loop.first %}{{- "\n" }}{% endif %}
{{- '<tool_call>\n{"name" : "' + call.function.name + '" , "arguments" : ' + arguments }}
{{- "}\n</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\n" }}
{%- elif message.role == "tool" %}
"""
    + _TOOL_ANSWER
    + r"""
{%- elif message.role == "user" or not loop.first %}
{{- "<|im_start|>" + message.role + "\n" + content + "<|im_end|>\n" }}
{%- endif %}
{%- endfor %}
"""
    + _PROMPT
)


def build_tokenizer(directory: Path, template: str = PLAIN) -> Path:
    """Saves the tokenizer as a Hugging Face folder, which it returns."""
    # Here and not above: whoever wants only the ids shall not wait for this import.
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_bytes(),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


def build_model(directory: Path, template: str = PLAIN, seed: int = SEED) -> Path:
    """The tokenizer and, beside it, a Qwen2 of random weights: the same ones every time, for a seed.

    Loaded from here the tokenizer also brings text into NFC, as Qwen's does: for a model of this
    type transformers builds its own class around the vocabulary, whatever the folder says.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    build_tokenizer(directory, template)
    config = Qwen2Config(
        vocab_size=256 + len(IDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        # Heads of 32: the attention kernels of vLLM's CPU build have no 16.
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=IDS["<|endoftext|>"],
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    return directory


def build_model_apart(directory: Path, template: str = PLAIN) -> Path:
    """The same by a process of its own: one that is to stay light must not load torch."""
    code = (
        "import sys; from pathlib import Path; from tests.tiny_model import build_model; "
        "build_model(Path(sys.argv[1]), sys.argv[2])"
    )
    processes.run(
        [sys.executable, "-c", code, str(directory), template],
        cwd=Path(__file__).parent.parent,
        check=True,
        capture_output=True,
        preload="torch",
    )
    return directory


def saying(text: str, spelled: bool = False) -> dict[str, Any]:
    """The fields of a call that make a model say just this. A word such as `<think>` is its own
    token, as a trained model has it; `spelled`: its letters, as any model may sample it."""
    bias = -100 if spelled else 100
    return {
        "structured_outputs": {"choice": [text]},
        "logit_bias": {str(IDS[word]): bias for word in WORDS},
    }


def _bytes() -> "tokenizers.Tokenizer":
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    names = _names_of_bytes()
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={name: value for value, name in enumerate(names)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in MARKERS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in WORDS])
    return tokenizer


def _names_of_bytes() -> list[str]:
    """What a vocabulary calls each byte: itself if it prints, else the next character from U+0100."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = iter(range(0x100, 0x200))
    return [chr(value if value in printing else next(other)) for value in range(256)]
