"""The sampling settings of OpenAI's routes, as the engine's SamplingParams."""

from typing import Annotated, Any

import msgspec

from gateway.errors import BadRequest

Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
MAX_STOPS = 64


class SamplingBody(msgspec.Struct, kw_only=True):
    """What chat and text completions have in common: OpenAI's fields, then vLLM's."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: Positive | None = None
    n: Positive | None = None

    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] | None = None
    stop_token_ids: list[Natural] | None = None
    min_tokens: Natural | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[Natural] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None


PASSED_ON = (
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "min_tokens", "ignore_eos"),
    *("bad_words", "allowed_token_ids", "skip_special_tokens", "include_stop_str_in_output"),
    *("max_tokens", "structured_outputs"),
)
"""Fields that the engine knows by the same name."""


def sampling_params(body: SamplingBody) -> dict[str, Any]:
    """The settings that the client gave; the engine has the defaults."""
    if body.n is not None and body.n > 1:
        raise BadRequest(
            "n must be 1: every sample is a Step of its own, and of several Steps that answer one "
            "request only one is trained; open a trajectory for each sample",
            param="n",
        )
    given = {name: value for name in PASSED_ON if (value := getattr(body, name)) is not None}
    if stops := stop_strings(body.stop):
        given["stop"] = stops
    if body.response_format is not None:
        given |= _structured(body.response_format)
    return given


def stop_strings(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS or not all(stops):
        raise BadRequest(f"stop takes up to {MAX_STOPS} strings, none empty", param="stop")
    return stops


def _structured(response_format: dict[str, Any]) -> dict[str, Any]:
    kind = response_format.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"structured_outputs": {"json_object": True}}
    named = response_format.get("json_schema")
    if kind != "json_schema" or not isinstance(named, dict) or "schema" not in named:
        raise BadRequest(
            "response_format must be text, json_object, or json_schema with a schema",
            param="response_format",
        )
    return {"structured_outputs": {"json": named["schema"]}}
