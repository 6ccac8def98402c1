"""The sampling fields of OpenAI's routes, converted to the engine's SamplingParams."""

from functools import partial
from typing import Annotated, Any

import msgspec

from gateway.errors import BadRequest, decoded

Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
MAX_STOPS = 64
MAX_SAMPLES = 128


class SamplingBody(msgspec.Struct, kw_only=True):
    """Sampling fields that several routes share: OpenAI's, then vLLM's additions."""

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


ENGINE_FIELDS = (
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "min_tokens", "ignore_eos"),
    *("bad_words", "allowed_token_ids", "skip_special_tokens", "include_stop_str_in_output"),
    *("max_tokens", "structured_outputs"),
)
"""Fields that the engine has under the same name."""


def sampling_params(body: SamplingBody) -> dict[str, Any]:
    """The parameters that the client set; the engine has the defaults."""
    if body.n is not None and body.n > 1:
        raise BadRequest(
            "n must be 1: every sample is a Step of its own, and only one Step per request is trained. "
            "Start one trajectory per sample.",
            param="n",
        )
    params = {name: value for name in ENGINE_FIELDS if (value := getattr(body, name)) is not None}
    if stops := stop_strings(body.stop):
        params["stop"] = stops
    if body.response_format is not None:
        params |= _structured_outputs(body.response_format)
    return params


def check_sampling(params: dict[str, Any], field: str) -> SamplingBody:
    """Checks the sampling parameters in a field of a body; those that the gateway does not know may be
    anything."""
    checked: SamplingBody = decoded(partial(msgspec.convert, type=SamplingBody), params, field)
    return checked


def check_sample_count(n: object) -> int:
    if not isinstance(n, int) or not 1 <= n <= MAX_SAMPLES:
        raise BadRequest(f"n must be an integer from 1 to {MAX_SAMPLES}.", param="n")
    return n


def stop_strings(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS or not all(stops):
        raise BadRequest(f"stop must be at most {MAX_STOPS} non-empty strings.", param="stop")
    return stops


def _structured_outputs(response_format: dict[str, Any]) -> dict[str, Any]:
    kind = response_format.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"structured_outputs": {"json_object": True}}
    json_schema = response_format.get("json_schema")
    if kind != "json_schema" or not isinstance(json_schema, dict) or "schema" not in json_schema:
        raise BadRequest(
            "response_format.type must be text, json_object, or json_schema with json_schema.schema.",
            param="response_format",
        )
    return {"structured_outputs": {"json": json_schema["schema"]}}
