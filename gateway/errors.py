"""Errors that are sent to clients.

    ApiError             500  a message, an HTTP status, and OpenAI's `type` and `code`
    ├── BadRequest       400  the body or the path is invalid
    ├── Unauthorized     401  the key or the base URL's signature is missing or wrong
    ├── NotFound         404  no such trajectory, or another tenant's
    ├── Conflict         409  the trajectory is already completed
    ├── TooLarge         413  a limit on sizes
    ├── Unprocessable    422  well formed, but contradicts itself or the log
    ├── EngineFailed     502  no engine returned a usable answer
    ├── NotConfigured    503  the gateway runs without what the route needs
    └── RetryLater            ends by itself; has Retry-After
        ├── TooMany      429  a limit on numbers, or admission
        └── Unavailable  503  Kafka or the engines are unavailable

A request that would fail again carries `x-should-retry: false`, which the OpenAI and Anthropic clients
obey; without it they would retry a 409 for as long as they retry anything.

No Step is recorded for a request that ends in one of these, with one unavoidable exception: when
Kafka's acknowledgement is lost, the Step may be in the log although its client got a 503."""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import msgspec

from gateway.waits import retry_seconds

T = TypeVar("T")

RESTART_S = 2.0
"""Seconds that a client waits if nothing better is known: a process restarts in about that time."""


CONTEXT_OVERFLOW = "context_length_exceeded"
"""The code of a call whose prompt does not fit into the model's context, as OpenAI has it."""


class ApiError(Exception):
    """An error response. `kind` is OpenAI's `type`; `param` names the field at fault."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    is_final: ClassVar[bool] = False
    """Whether the same request would fail again."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"x-should-retry", b"false")] if self.is_final else []

    def body(self) -> dict[str, Any]:
        fields = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}


class BadRequest(ApiError):
    status = 400
    kind = "invalid_request_error"
    is_final = True


class Unauthorized(ApiError):
    status = 401
    kind = "authentication_error"
    is_final = True


class NotFound(ApiError):
    status = 404
    kind = "not_found_error"
    is_final = True


class Conflict(ApiError):
    status = 409
    kind = "invalid_request_error"
    is_final = True


class TooLarge(ApiError):
    status = 413
    kind = "invalid_request_error"
    is_final = True


class Unprocessable(ApiError):
    status = 422
    kind = "invalid_request_error"
    is_final = True


class RetryLater(ApiError):
    """An error that ends by itself. `wait_s`: about how long that takes."""

    def __init__(self, message: str, *, wait_s: float = RESTART_S, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_seconds(wait_s)

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"retry-after", str(self.retry_after).encode())]


class TooMany(RetryLater):
    status = 429
    kind = "rate_limit_error"


class EngineFailed(ApiError):
    status = 502


class Unavailable(RetryLater):
    status = 503


class NotConfigured(ApiError):
    status = 503
    is_final = True


def bad_body(error: msgspec.ValidationError | msgspec.DecodeError, parent: str = "") -> BadRequest:
    """The 400 of a decoding error. msgspec appends the field: "Expected `int`, got `str` - at
    `$.seed`". `parent` is the field whose value was decoded, if it was not the whole body."""
    reason, _, path = str(error).partition(" - at `$")
    param = (parent + path.rstrip("`")).lstrip(".") or None
    field = f" at {param}" if param else ""
    return BadRequest(f"The request body is invalid{field}: {reason}", param=param)


def decoded(decode: Callable[[Any], T], body: Any, parent: str = "") -> T:
    """Decodes a body, or the value of its field `parent`; each of the three ways in which that can
    fail is a 400."""
    try:
        return decode(body)
    except msgspec.DecodeError as error:
        raise bad_body(error, parent) from error
    except UnicodeDecodeError as error:
        raise BadRequest("The request body is not valid UTF-8.") from error
    except RecursionError as error:
        raise BadRequest("The request body is nested too deeply.") from error
