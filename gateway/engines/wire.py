"""The routes of a vLLM server that the gateway uses, as types.

`/inference/v1/generate` takes token ids and gives token ids, so nothing between the agent and the log
is ever tokenised twice. It needs `--enable-scale-out`, and `--logprobs-mode processed_logprobs` for
the values that the trainer compares with.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from pool.core.versions import Version
from schemas import Segment

UNKNOWN_LOGPROB = -9999.0
"""What vLLM writes for a token whose logprob it does not have."""


class Alternative(msgspec.Struct):
    token_id: int
    logprob: float


class Sampled(Alternative):
    top_logprobs: list[Alternative] = []


class SampledOnly(msgspec.Struct):
    """The same without the alternatives, which most clients do not want: decoding skips them."""

    token_id: int
    logprob: float


class Logprobs(msgspec.Struct):
    content: list[Sampled] | None = None


class LogprobsOnly(msgspec.Struct):
    content: list[SampledOnly] | None = None


class Span(msgspec.Struct):
    """Tokens from `start` on were sampled by these weights."""

    version: str
    start: int


class Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: LogprobsOnly | None = None
    finish_reason: str | None = None
    weight_versions: list[Span] | None = None


class ChoiceWithAlternatives(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[Span] | None = None


AnyChoice = Choice | ChoiceWithAlternatives


class ErrorBody(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class Generated(msgspec.Struct):
    """An answer, or a chunk of a streamed one."""

    choices: list[Choice] = []
    error: ErrorBody | None = None


class GeneratedWithAlternatives(msgspec.Struct):
    choices: list[ChoiceWithAlternatives] = []
    error: ErrorBody | None = None


class PromptLogprob(msgspec.Struct):
    logprob: float


class AskedPrompt(msgspec.Struct):
    """An answer of which only the prompt's part is wanted."""

    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class Called(msgspec.Struct):
    id: str | None = None
    index: int = 0
    function: CalledFunction = CalledFunction()


class Parsed(msgspec.Struct, frozen=True):
    """What the engine's parsers make of ids."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Called] = []


class ParsedChoice(msgspec.Struct):
    message: Parsed = Parsed()
    delta: Parsed = Parsed()


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
asked_prompt = msgspec.json.Decoder(AskedPrompt).decode
error_body = msgspec.json.Decoder(Generated).decode
derendered = msgspec.json.Decoder(Derendered).decode
derendered_chunk = msgspec.json.Decoder(DerenderedChunk).decode
rendered = msgspec.json.Decoder(Rendered).decode
model_list = msgspec.json.Decoder(ModelList).decode
weight_info = msgspec.json.Decoder(WeightInfo).decode


class Malformed(ValueError):
    """An answer that cannot become a Step: the engine is at fault."""


class Sample(msgspec.Struct):
    """What was sampled so far. Ids and logprobs have the same length after every chunk."""

    ids: list[int] = []
    logprobs: list[float] = []
    alternatives: list[Sampled] = []
    finish_reason: str | None = None
    segments: list[Segment] = []

    def add(self, choice: AnyChoice) -> None:
        ids = choice.token_ids or []
        content = (choice.logprobs and choice.logprobs.content) or []
        if len(ids) != len(content):
            raise Malformed(f"the engine sent {len(ids)} tokens with {len(content)} logprobs")
        self.ids += ids
        self.logprobs += [entry.logprob for entry in content]
        if isinstance(choice, ChoiceWithAlternatives):
            self.alternatives += (choice.logprobs and choice.logprobs.content) or []
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
            self.segments = segments(choice.weight_versions or ())


def segments(spans: Iterable[Span]) -> list[Segment]:
    """Version 0 of incarnation 0 stands for weights that no trainer of ours has sent."""
    found = []
    for span in spans:
        incarnation, number = Version.parse(span.version) or Version(0, 0)
        found.append(Segment(incarnation=incarnation, version=number, first_token=span.start))
    return found or [Segment(incarnation=0, version=0, first_token=0)]
