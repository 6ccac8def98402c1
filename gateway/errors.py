"""What a client is told when something is wrong.

    ApiError                  one sentence, an HTTP status and OpenAI's `type` and `code`
    ├── BadRequest            400  the body or the path cannot be used
    ├── Unauthorized          401  no key, or an unknown one
    ├── NotFound              404  no such trajectory, or another tenant's
    ├── Conflict              409  the trajectory is closed
    ├── TooLarge              413  a limit on size
    ├── Unprocessable         422  well formed, and contradicts itself or the log
    ├── TooMany               429  a limit on numbers, or admission; says when to come back
    ├── EngineFailed          502  no engine gave a usable answer
    └── Unavailable           503  Kafka or the engines cannot be used now; says when to come back

Nothing is recorded for a request that ends in one of these, with one exception that nobody can avoid:
when Kafka's acknowledgement is lost, the Step may be in the log although its client was told 503.
"""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import msgspec

T = TypeVar("T")

RETRY_AFTER = 2
"""Seconds that a client is asked to wait: brokers and engines restart in about that time."""


class ApiError(Exception):
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
        about = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": about}


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
    """msgspec ends its sentence with the place: "Expected `int`, got `str` - at `$.seed`"."""
    told, _, place = str(error).partition(" - at `$")
    param = place.rstrip("`").lstrip(".") or None
    where = f" at {param}" if param else ""
    return BadRequest(f"the request body cannot be used{where}: {told}", param=param)


def decoded(decode: Callable[[Any], T], body: Any) -> T:
    """What `decode` makes of the body. Bytes from outside fail in three ways, and each is a 400."""
    try:
        return decode(body)
    except msgspec.DecodeError as error:
        raise bad_body(error) from error
    except UnicodeDecodeError as error:
        raise BadRequest("the request body is not UTF-8") from error
    except RecursionError as error:
        raise BadRequest("the request body is nested too deeply") from error
