"""The demo's model: a Qwen2 with two layers and one token per word, made on the spot.

Not every machine can download a model, and a larger one would not learn on two cores in minutes.
The model folder is made in two steps. `prepare` writes what an engine needs to start, in a second
and without torch; the engine gets its weights from the trainer anyway. Meanwhile `warm_up` makes
the weights.

The warm start is supervised training on conversations in which three words in ten are right and the
others are random. It teaches how a tool call is written and when to answer, but hardly what to say: the
model starts with a reward of 0.2, and learns the rest from rewards.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from steplog.demo.task import (
    ASK,
    CALL,
    PEOPLE,
    PHRASES,
    PLACES,
    TURNS,
    Search,
    conversation,
)

MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
ROLES = ("system\n", "user\n", "assistant\n", "tool\n")
WORDS = ("<tool_call>", "</tool_call>", *CALL, *ROLES, *PHRASES, *PEOPLE, *PLACES)
IDS = {text: 256 + index for index, text in enumerate((*MARKERS, *WORDS))}
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    # Heads of 32: the attention kernels of vLLM's CPU build have no 16.
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    # With the usual 0.02, so small a model needs minutes to learn to attend to earlier messages.
    "initializer_range": 0.1,
}
RIGHT_SHARE = 0.3
"""Share of the words that are right in the warm start; the others are random."""
WARM_STEPS = 300
WARM_BATCH = 32
WARM_RATE = 3e-3
SEED = 7

TEMPLATE = r"""
{%- if tools %}
{{- "<|im_start|>system\nTools:" }}
{%- for tool in tools %}{{- " " + tool.function.name }}{% endfor %}
{{- "<|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\n" + (message.content or "") }}
{%- for call in message.tool_calls or [] %}
{%- set arguments = call.function.arguments %}
{%- if arguments is not string %}{% set arguments = arguments | tojson %}{% endif %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + arguments }}
{{- "}</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n" }}{% endif %}
"""


def prepare(folder: Path) -> None:
    """Write the tokenizer and the configuration; the weights come later."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(_config(), indent=2) + "\n")


def _config() -> dict[str, Any]:
    return {
        **SHAPE,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 256 + len(IDS),
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": IDS["<|im_end|>"],
        "pad_token_id": IDS["<|endoftext|>"],
        "dtype": "float32",
    }


def _tokenizer() -> Any:
    """A byte-level tokenizer with added words that are never split."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    names = {name: value for value, name in enumerate(_byte_names())}
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in MARKERS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in WORDS])
    return tokenizer


def _byte_names() -> list[str]:
    """The names of bytes in byte-level vocabularies: printable ones are themselves, others start at
    U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(value if value in printable else next(others)) for value in range(256)]


def warm_up(folder: Path, steps: int = WARM_STEPS) -> None:
    """Add the weights to a prepared folder."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen2ForCausalLM

    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    model = Qwen2ForCausalLM(AutoConfig.from_pretrained(folder))
    examples, rng = WarmStartExamples(AutoTokenizer.from_pretrained(folder)), random.Random(SEED)
    optimiser = torch.optim.AdamW(model.parameters(), lr=WARM_RATE, weight_decay=0.0)
    for _ in range(steps):
        ids = torch.tensor([examples.draw(rng) for _ in range(WARM_BATCH)])
        targets = torch.where(torch.tensor(examples.is_target), ids, -100)
        model(input_ids=ids, labels=targets).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    model.save_pretrained(folder)


class WarmStartExamples:
    """The conversations of the warm start. Every name is one token, so they differ in six tokens
    only."""

    def __init__(self, tokenizer: Any) -> None:
        solution, answers = Search("ann", "bob", "attic"), ("cleo", "dan", "barn")
        text = tokenizer.apply_chat_template(
            conversation(solution, answers), tools=[ASK], tokenize=False
        )
        self._ids: list[int] = []
        self.is_target: list[bool] = []
        for turn in text.split("<|im_start|>")[1:]:
            role, content = turn.split("\n", 1)
            self._add(tokenizer.encode(f"<|im_start|>{role}\n"), False)
            self._add(tokenizer.encode(content.removesuffix("\n")), role == "assistant")
            self._add(tokenizer.encode("\n"), False)
        self._solution_at = [self._ids.index(IDS[word]) for word in solution.words]
        self._answers_at = [self._ids.index(IDS[word]) for word in answers]

    def _add(self, ids: list[int], is_target: bool) -> None:
        self._ids += ids
        self.is_target += [is_target] * len(ids)

    def draw(self, rng: random.Random) -> list[int]:
        """The token ids of one random conversation."""
        solution, ids = Search.draw(rng), list(self._ids)
        for turn, right in enumerate(solution.words):
            guess = rng.choice(PLACES if turn == TURNS - 1 else PEOPLE)
            ids[self._solution_at[turn]] = IDS[right]
            ids[self._answers_at[turn]] = IDS[right if rng.random() < RIGHT_SHARE else guess]
        return ids


if __name__ == "__main__":
    warm_up(Path(sys.argv[1]))
