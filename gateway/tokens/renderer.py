"""Renders messages into token ids and ids into text, with the model's tokenizer and chat template.

A conversation continues exactly where the engine left off. When a call continues an earlier answer,
its prompt is that Step's prompt, then the sampled ids, then only the ids of what follows. Rendering
the whole history again would give other ids: templates drop earlier reasoning and write tool calls
in their own spacing, and tokenizers split text differently from the model.

The text that follows an answer is found by rendering a short conversation in which the answer is
replaced by a marker: it is the text after the marker, without the end of turn that the model
already sampled.
"""

import inspect
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream

from gateway.dialects.request import Message, Request
from gateway.errors import BadRequest
from gateway.tokens.encoder import Encoder
from gateway.tokens.late_system_turns import choose_rendering
from gateway.tokens.parser_context import parser_context
from gateway.tokens.prompts import Prompt, PromptCache
from servicekit.errors import Fatal
from servicekit.tokenizer import fingerprint

LEAD: Message = {"role": "user", "content": "."}
"""Replaces the history before the marker: templates expect a user's turn before an answer."""

TEMPLATE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""What templates raise, besides TemplateError, on messages that they do not expect."""


class UnusableTokenizer(Fatal):
    """The configured folder has no usable tokenizer."""


class Renderer:
    """Renders and decodes with one tokenizer. `fingerprint` identifies it in every Step."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._markers = frozenset(self._backend.get_added_tokens_decoder())
        self._encoder = Encoder(self._backend)
        self._prompt_cache = PromptCache(self._encode_messages, tokenizer.chat_template)
        # A client may set the template's variables, but not the template or how it is applied.
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved_names = parameters.keys() - {"documents"}
        self._marker = f"marker{secrets.token_hex(8)}"
        self._adapt = choose_rendering(lambda messages: self._apply_template(messages, Request()))
        self.fingerprint = fingerprint(self._backend)

    @classmethod
    def load(cls, folder: str) -> "Renderer":
        """Loads the tokenizer of a folder. Takes seconds: run it in a thread."""
        if not Path(folder).is_dir():
            raise UnusableTokenizer(
                f"--tokenizer {folder} is not a folder. Give the folder of the model's tokenizer."
            )
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise UnusableTokenizer(f"Cannot load a tokenizer from {folder}: {error}") from error
        if not tokenizer.is_fast:
            raise UnusableTokenizer(
                f"{folder} has no tokenizer.json. The gateway needs a fast tokenizer: save one with "
                "transformers' save_pretrained()."
            )
        return cls(tokenizer)

    def prompt(self, request: Request) -> Prompt:
        """The prompt of a call that continues no earlier answer."""
        if isinstance(request.prompt, list):
            return Prompt(request.prompt)
        if request.prompt is not None:
            return Prompt(self._backend.encode(request.prompt).ids)
        return self._prompt_cache.get(request)

    def _encode_messages(self, request: Request) -> list[int]:
        return self._encoder.encode(self._render(request.messages, request))

    def continuation(self, request: Request, answered: int, last_id: int) -> list[int] | None:
        """The ids between an answer, `messages[answered - 1]`, and the next one. `last_id` is the last
        sampled id. None if the template does not show where the answer ends."""
        assistant, tail = request.messages[answered - 1], request.messages[answered:]
        marked: Message = {"role": "assistant", "content": self._marker}
        if "tool_calls" in assistant:
            # Without arguments, which may contain the text of an end of turn.
            marked["tool_calls"] = [_without_arguments(call) for call in assistant["tool_calls"]]
        after_marker = self._text_after_marker(request, answered, [marked, *tail])
        if after_marker is None:
            return None
        if last_id in self._special:
            # Skip the tool calls and the end of turn: the model has sampled both.
            _, end_of_turn, rest = after_marker.partition(self._backend.id_to_token(last_id))
            if end_of_turn:
                return self._encoder.encode(rest)
        if "tool_calls" in assistant:
            # It was cut off before its end of turn, which the template puts after the calls.
            end = self._tokenizer.eos_token or ""
            at = after_marker.find(end) if end else -1
            return self._encoder.encode(after_marker[at:]) if at >= 0 else None
        return self._encoder.encode(after_marker)

    def _text_after_marker(
        self, request: Request, answered: int, turn: Sequence[Message]
    ) -> str | None:
        system = [m for m in request.messages[:1] if m["role"] == "system"]
        for lead in ([*system, LEAD], request.messages[: answered - 1]):
            try:
                text = self._render([*lead, *turn], request)
            except BadRequest:
                continue  # some templates require more history than LEAD
            _, marker, rest = text.rpartition(self._marker)
            if marker:
                return rest
        return None

    def _render(self, messages: Sequence[Message], request: Request) -> str:
        reserved = self._reserved_names & request.template.keys()
        if reserved:
            raise BadRequest(
                f"chat_template_kwargs must not contain {', '.join(sorted(reserved))}: only variables "
                "of the chat template can be set.",
                param="chat_template_kwargs",
            )
        return self._apply_template(self._adapt(messages), request)

    def _apply_template(self, messages: Sequence[Message], request: Request) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=request.tools,
                add_generation_prompt=True,
                tokenize=False,
                **request.template,
            )
        except (TemplateError, *TEMPLATE_ERRORS) as error:
            raise BadRequest(
                f"The chat template cannot render these messages: {error}", param="messages"
            ) from error
        return text

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def without_end(
        self, ids: Sequence[int], text: str, sampling: Mapping[str, Any], stopped: bool
    ) -> Sequence[int]:
        """The ids of an answer's text: without the end of turn, or the stop string."""
        end, skip_special = len(ids), sampling.get("skip_special_tokens", True)
        if stopped:
            while end and self.decode(ids[: end - 1], skip_special).startswith(text):
                end -= 1
        elif ids and (ids[-1] in self._special or ids[-1] in self._end_ids(sampling)):
            end -= 1
        return ids[:end]

    def _end_ids(self, sampling: Mapping[str, Any]) -> frozenset[int]:
        """Ids that are not part of the text if an answer ends with one of them; as in vLLM."""
        if sampling.get("include_stop_str_in_output"):
            return frozenset()
        stops = sampling.get("stop_token_ids")
        return self._special.union(stops) if stops else self._special

    def parser_context(self, prompt: Sequence[int]) -> list[int]:
        """The ids of a prompt that the engine's parser needs for a streamed answer."""
        return parser_context(prompt, self._markers)

    def token(self, token_id: int) -> str:
        """The text of a single id."""
        return self.decode([token_id], skip_special=False)

    def text_stream(self, sampling: Mapping[str, Any]) -> "TextStream":
        return TextStream(self._backend, sampling, self._end_ids(sampling))

    def text(self, ids: Sequence[int], sampling: Mapping[str, Any]) -> tuple[str, str | None]:
        """An answer's text, and the stop string that ended it."""
        text_ids = ids[:-1] if ids and ids[-1] in self._end_ids(sampling) else ids
        text = self.decode(text_ids, sampling.get("skip_special_tokens", True))
        return cut_at_stop(text, sampling)


class TextStream:
    """Decodes ids as they arrive. Withholds what may turn out to be a stop string or the end of the
    answer, and incomplete characters."""

    def __init__(self, backend: Any, sampling: Mapping[str, Any], end_ids: frozenset[int]) -> None:
        self._backend = backend
        self._end_ids = end_ids
        self._held_ids: tuple[int, ...] = ()
        self._sampling = sampling
        self._decoder = DecodeStream(skip_special_tokens=sampling.get("skip_special_tokens", True))
        self._has_stops = bool(sampling.get("stop"))
        self._withheld = max((len(stop) for stop in sampling.get("stop", ())), default=1) - 1
        self._text = ""
        self._sent = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Adds ids; returns the new text that is certain."""
        ids = (*self._held_ids, *ids)
        self._held_ids = ids[-1:] if ids and ids[-1] in self._end_ids else ()
        ids = ids[: len(ids) - len(self._held_ids)]
        self._text += "".join(self._decoder.step(self._backend, i) or "" for i in ids)
        if not self._has_stops:
            return self._unsent(self._text)
        cut, stop = cut_at_stop(self._text, self._sampling)
        certain = cut if stop else self._text[: max(0, len(self._text) - self._withheld)]
        return self._unsent(certain)

    def end(self, answer: str) -> str:
        """The rest of the answer, given all of its text."""
        return self._unsent(answer)

    def _unsent(self, text: str) -> str:
        new = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return new


def _without_arguments(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"function": call["function"] | {"arguments": {}}}


def cut_at_stop(text: str, sampling: Mapping[str, Any]) -> tuple[str, str | None]:
    """The text up to the first of the client's stop strings, and that string."""
    matches = [(at, stop) for stop in sampling.get("stop", ()) if (at := text.find(stop)) >= 0]
    if not matches:
        return text, None
    at, stop = min(matches)
    return text[: at + len(stop) if sampling.get("include_stop_str_in_output") else at], stop
