"""The bodies of the vLLM routes that the gateway uses.

`/inference/v1/generate` takes token ids and returns token ids, so an answer is never tokenized again on
its way into the log. It needs `--enable-scale-out`, and `--logprobs-mode processed_logprobs` for the
logprobs that the trainer needs.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from pool.core.versions import Version
from schemas import Segment

UNKNOWN_LOGPROB = -9999.0
"""vLLM's placeholder for a token without a logprob."""


class Alternative(msgspec.Struct):
    token_id: int
    logprob: float


class SampledToken(Alternative):
    top_logprobs: list[Alternative] = []


class SampledTokenOnly(msgspec.Struct):
    """The same without alternatives, which most clients do not ask for: decoding skips them."""

    token_id: int
    logprob: float


class ChoiceLogprobs(msgspec.Struct):
    content: list[SampledToken] | None = None


class ChoiceLogprobsOnly(msgspec.Struct):
    content: list[SampledTokenOnly] | None = None


class VersionSpan(msgspec.Struct):
    """Tokens from `start` on were sampled by these weights."""

    version: str
    start: int


class Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: ChoiceLogprobsOnly | None = None
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None


class ChoiceWithAlternatives(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None


AnyChoice = Choice | ChoiceWithAlternatives


class EngineErrorBody(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class Generated(msgspec.Struct):
    """An answer, or a chunk of a streamed one."""

    choices: list[Choice] = []
    error: EngineErrorBody | None = None


class GeneratedWithAlternatives(msgspec.Struct):
    choices: list[ChoiceWithAlternatives] = []
    error: EngineErrorBody | None = None


class PromptLogprob(msgspec.Struct):
    logprob: float


class PromptLogprobsAnswer(msgspec.Struct):
    """An answer of which only the prompt's logprobs are used."""

    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class ParsedFunction(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class ParsedToolCall(msgspec.Struct):
    id: str | None = None
    index: int = 0
    function: ParsedFunction = ParsedFunction()


class ParsedMessage(msgspec.Struct, frozen=True):
    """A message as the engine's parsers read it from ids."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ParsedToolCall] = []


class ParsedChoice(msgspec.Struct):
    message: ParsedMessage = ParsedMessage()
    delta: ParsedMessage = ParsedMessage()


class Derendered(msgspec.Struct):
    choices: list[ParsedChoice] = []


class DerenderedChunk(msgspec.Struct):
    chunk: Derendered
    stream_state: msgspec.Raw


class RenderedParams(msgspec.Struct):
    structured_outputs: dict[str, Any] | None = None


class Rendered(msgspec.Struct):
    sampling_params: RenderedParams


class ModelCard(msgspec.Struct):
    id: str


class ModelList(msgspec.Struct):
    data: list[ModelCard]


class WeightInfo(msgspec.Struct):
    weight_version: str


generated = msgspec.json.Decoder(Generated).decode
generated_with_alternatives = msgspec.json.Decoder(GeneratedWithAlternatives).decode
prompt_logprobs_answer = msgspec.json.Decoder(PromptLogprobsAnswer).decode
error_body = msgspec.json.Decoder(Generated).decode
derendered = msgspec.json.Decoder(Derendered).decode
derendered_chunk = msgspec.json.Decoder(DerenderedChunk).decode
rendered = msgspec.json.Decoder(Rendered).decode
model_list = msgspec.json.Decoder(ModelList).decode
weight_info = msgspec.json.Decoder(WeightInfo).decode


class MalformedAnswer(ValueError):
    """An engine's answer that cannot become a Step."""


class SampledTokens(msgspec.Struct):
    """Everything sampled so far. Ids and logprobs have the same length after every chunk."""

    ids: list[int] = []
    logprobs: list[float] = []
    alternatives: list[SampledToken] = []
    finish_reason: str | None = None
    segments: list[Segment] = []

    def add(self, choice: AnyChoice) -> None:
        ids = choice.token_ids or []
        content = (choice.logprobs and choice.logprobs.content) or []
        if len(ids) != len(content):
            raise MalformedAnswer(
                f"the engine returned {len(ids)} tokens with {len(content)} logprobs"
            )
        self.ids += ids
        self.logprobs += [entry.logprob for entry in content]
        if isinstance(choice, ChoiceWithAlternatives):
            self.alternatives += (choice.logprobs and choice.logprobs.content) or []
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
            self.segments = version_segments(choice.weight_versions or ())


def version_segments(spans: Iterable[VersionSpan]) -> list[Segment]:
    """The weights that sampled each part of an answer. Version 0 of incarnation 0 stands for
    weights that no steplog trainer has sent."""
    segments = []
    for span in spans:
        incarnation, number = Version.parse(span.version) or Version(0, 0)
        segments.append(Segment(incarnation=incarnation, version=number, first_token=span.start))
    return segments or [Segment(incarnation=0, version=0, first_token=0)]
