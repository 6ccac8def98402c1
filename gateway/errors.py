"""Errors that are sent to clients.

    ApiError             500  a message, an HTTP status, and OpenAI's `type` and `code`
    ├── BadRequest       400  the body or the path is invalid
    ├── Unauthorized     401  the key or the base URL's signature is missing or wrong
    ├── NotFound         404  no such trajectory, or another tenant's
    ├── Conflict         409  the trajectory is already completed
    ├── TooLarge         413  a limit on sizes
    ├── Unprocessable    422  well formed, but contradicts itself or the log
    ├── TooMany          429  a limit on numbers, or admission; has Retry-After
    ├── EngineFailed     502  no engine returned a usable answer
    └── Unavailable      503  Kafka or the engines are unavailable; has Retry-After

Nothing is recorded for a request that ends in one of these, with one unavoidable exception: when
Kafka's acknowledgement is lost, the Step may be in the log although its client got a 503."""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import msgspec

T = TypeVar("T")

RETRY_AFTER = 2
"""Seconds, for the Retry-After header: brokers and engines restart in about that time."""


class ApiError(Exception):
    """An error response. `kind` is OpenAI's `type`; `param` names the field at fault."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    retry_after: int | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code

    def headers(self) -> list[tuple[bytes, bytes]]:
        if self.retry_after is None:
            return []
        return [(b"retry-after", str(self.retry_after).encode())]

    def body(self) -> dict[str, Any]:
        fields = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}


class BadRequest(ApiError):
    status = 400
    kind = "invalid_request_error"


class Unauthorized(ApiError):
    status = 401
    kind = "authentication_error"


class NotFound(ApiError):
    status = 404
    kind = "not_found_error"


class Conflict(ApiError):
    status = 409
    kind = "invalid_request_error"


class TooLarge(ApiError):
    status = 413
    kind = "invalid_request_error"


class Unprocessable(ApiError):
    status = 422
    kind = "invalid_request_error"


class TooMany(ApiError):
    status = 429
    kind = "rate_limit_error"
    retry_after = RETRY_AFTER


class EngineFailed(ApiError):
    status = 502


class Unavailable(ApiError):
    status = 503
    retry_after = RETRY_AFTER


def bad_body(error: msgspec.ValidationError | msgspec.DecodeError) -> BadRequest:
    """The 400 of a decoding error. msgspec appends the field: "Expected `int`, got `str` - at
    `$.seed`"."""
    reason, _, path = str(error).partition(" - at `$")
    param = path.rstrip("`").lstrip(".") or None
    field = f" at {param}" if param else ""
    return BadRequest(f"The request body is invalid{field}: {reason}", param=param)


def decoded(decode: Callable[[Any], T], body: Any) -> T:
    """Decodes a body; each of the three ways in which that can fail is a 400."""
    try:
        return decode(body)
    except msgspec.DecodeError as error:
        raise bad_body(error) from error
    except UnicodeDecodeError as error:
        raise BadRequest("The request body is not valid UTF-8.") from error
    except RecursionError as error:
        raise BadRequest("The request body is nested too deeply.") from error
