"""Messages to token ids and ids to text, with the model's own tokenizer and chat template.

A conversation goes on exactly where the engine left off. When a call continues an earlier answer,
its prompt is that Step's prompt, then the ids that were sampled, then only the ids of what follows.
Rendering the whole history anew would not give them back: templates drop earlier reasoning and write
tool calls in their own spacing, and tokenizers split text in ways that models do not.

What follows an answer is found by rendering a short conversation in which the answer is replaced by
a marker: the text behind the marker, after the end of turn that the model has already sampled.
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
from gateway.tokens.prompts import Prompt, Prompts
from servicekit.errors import Fatal
from servicekit.tokenizer import fingerprint

LEAD: Message = {"role": "user", "content": "."}
"""Stands for the history in front of the marker: templates want a user's turn before an answer."""

TEMPLATE_TROUBLES = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""What templates raise, besides their own errors, on messages that they do not expect."""


class UnusableTokenizer(Fatal):
    """The folder holds no tokenizer that can render and stream."""


class Renderer:
    """One tokenizer. `fingerprint` names it in every Step."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._encoder = Encoder(self._backend)
        self._prompts = Prompts(self._encode_messages, tokenizer.chat_template)
        # A client sets variables of the template, not the template, or how it is applied.
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._parameters = parameters.keys() - {"documents"}
        self._marker = f"marker{secrets.token_hex(8)}"
        self.fingerprint = fingerprint(self._backend)

    @classmethod
    def load(cls, folder: str) -> "Renderer":
        """Takes seconds: run it in a thread."""
        if not Path(folder).is_dir():
            raise UnusableTokenizer(f"there is no tokenizer at {folder}: it is not a folder")
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise UnusableTokenizer(f"{folder} holds no tokenizer: {error}") from error
        if not tokenizer.is_fast:
            raise UnusableTokenizer(f"{folder} has no tokenizer.json, which the gateway needs")
        return cls(tokenizer)

    def prompt(self, request: Request) -> Prompt:
        """The prompt of a call that continues nothing."""
        if isinstance(request.prompt, list):
            return Prompt(request.prompt)
        if request.prompt is not None:
            return Prompt(self._backend.encode(request.prompt).ids)
        return self._prompts.of(request)

    def _encode_messages(self, request: Request) -> list[int]:
        return self._encoder.encode(self._render(request.messages, request))

    def continuation(self, request: Request, answered: int, last_id: int) -> list[int] | None:
        """The ids between an answer, `messages[answered - 1]`, and the next one. `last_id` is the
        last that was sampled. None: this template does not tell where the answer ends."""
        assistant, tail = request.messages[answered - 1], request.messages[answered:]
        marked: Message = {"role": "assistant", "content": self._marker}
        if "tool_calls" in assistant:
            # Without arguments, which may well have the text of an end of turn in them.
            marked["tool_calls"] = [_without_arguments(call) for call in assistant["tool_calls"]]
        behind = self._behind_marker(request, answered, [marked, *tail])
        if behind is None:
            return None
        if last_id in self._special:
            # The tool calls, then the end of turn: the model has said both.
            _, found, after = behind.partition(self._backend.id_to_token(last_id))
            if found:
                return self._encoder.encode(after)
        if "tool_calls" in assistant:
            # It was cut before its end of turn, which the template has behind the calls.
            end = self._tokenizer.eos_token or ""
            at = behind.find(end) if end else -1
            return self._encoder.encode(behind[at:]) if at >= 0 else None
        return self._encoder.encode(behind)

    def _behind_marker(
        self, request: Request, answered: int, turn: Sequence[Message]
    ) -> str | None:
        system = [m for m in request.messages[:1] if m["role"] == "system"]
        for lead in ([*system, LEAD], request.messages[: answered - 1]):
            try:
                text = self._render([*lead, *turn], request)
            except BadRequest:
                continue  # some templates insist on more history than the short one
            _, found, behind = text.rpartition(self._marker)
            if found:
                return behind
        return None

    def _render(self, messages: Sequence[Message], request: Request) -> str:
        ours = self._parameters & request.template.keys()
        if ours:
            raise BadRequest(
                f"chat_template_kwargs cannot set {', '.join(sorted(ours))}",
                param="chat_template_kwargs",
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=request.tools,
                add_generation_prompt=True,
                tokenize=False,
                **request.template,
            )
        except (TemplateError, *TEMPLATE_TROUBLES) as error:
            raise BadRequest(
                f"the chat template cannot render the messages: {error}", param="messages"
            ) from error
        return text

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def without_end(
        self, ids: Sequence[int], text: str, sampling: Mapping[str, Any], stopped: bool
    ) -> Sequence[int]:
        """The ids behind an answer's text: without the end of turn, or the stop string."""
        end, skip_special = len(ids), sampling.get("skip_special_tokens", True)
        if stopped:
            while end and self.decode(ids[: end - 1], skip_special).startswith(text):
                end -= 1
        elif ids and (ids[-1] in self._special or ids[-1] in self._ends(sampling)):
            end -= 1
        return ids[:end]

    def _ends(self, sampling: Mapping[str, Any]) -> frozenset[int]:
        """Ids that are no part of the text where an answer ends with them; as in vLLM."""
        if sampling.get("include_stop_str_in_output"):
            return frozenset()
        stops = sampling.get("stop_token_ids")
        return self._special.union(stops) if stops else self._special

    def token(self, token_id: int) -> str:
        """The text of one id alone."""
        return self.decode([token_id], skip_special=False)

    def text_stream(self, sampling: Mapping[str, Any]) -> "TextStream":
        return TextStream(self._backend, sampling, self._ends(sampling))

    def text(self, ids: Sequence[int], sampling: Mapping[str, Any]) -> tuple[str, str | None]:
        """An answer's text, and the stop string that ended it."""
        spoken = ids[:-1] if ids and ids[-1] in self._ends(sampling) else ids
        text = self.decode(spoken, sampling.get("skip_special_tokens", True))
        return cut_at_stop(text, sampling)


class TextStream:
    """Ids to text as they come. Holds back what may turn out to be a stop string or the end of the
    answer, and the bytes of half a character."""

    def __init__(self, backend: Any, sampling: Mapping[str, Any], ends: frozenset[int]) -> None:
        self._backend = backend
        self._ends = ends
        self._held: tuple[int, ...] = ()
        self._sampling = sampling
        self._decoder = DecodeStream(skip_special_tokens=sampling.get("skip_special_tokens", True))
        self._stops = bool(sampling.get("stop"))
        self._hold = max((len(stop) for stop in sampling.get("stop", ())), default=1) - 1
        self._text = ""
        self._told = 0

    def feed(self, ids: Sequence[int]) -> str:
        """The text that is certain now."""
        ids = (*self._held, *ids)
        self._held = ids[-1:] if ids and ids[-1] in self._ends else ()
        ids = ids[: len(ids) - len(self._held)]
        self._text += "".join(self._decoder.step(self._backend, i) or "" for i in ids)
        if not self._stops:
            return self._tell(self._text)
        cut, stop = cut_at_stop(self._text, self._sampling)
        return self._tell(cut if stop else self._text[: max(0, len(self._text) - self._hold)])

    def end(self, whole: str) -> str:
        """The rest of the answer, now that all of its text is known."""
        return self._tell(whole)

    def _tell(self, text: str) -> str:
        new = text[self._told :]
        self._told = max(self._told, len(text))
        return new


def _without_arguments(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"function": call["function"] | {"arguments": {}}}


def cut_at_stop(text: str, sampling: Mapping[str, Any]) -> tuple[str, str | None]:
    """The text before the first of the client's stop strings, and that string."""
    found = [(at, stop) for stop in sampling.get("stop", ()) if (at := text.find(stop)) >= 0]
    if not found:
        return text, None
    at, stop = min(found)
    return text[: at + len(stop) if sampling.get("include_stop_str_in_output") else at], stop
