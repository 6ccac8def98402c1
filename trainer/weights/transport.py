"""The interface of weight transports.

It follows vLLM's trainer side: a transport brings the trainer, as rank 0, and the workers of some
engines into one process group and returns a sender, which sends the weights once per call. Both drive
the engines through a client, whose calls go to all engines of the group. Whatever breaks a group ends
in `TransportFailed` or in an error of the client, never in a hang.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from trainer.weights.source import WeightSource

T = TypeVar("T")


class TransportFailed(Exception):
    """The process group broke or could not be formed. Errors of the members, if any, say more."""


class WeightSyncClient(Protocol):
    """The interface of vLLM's `VLLMWeightSyncClient`."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class WeightSender(Protocol):
    """The trainer's side of a process group that was formed."""

    def send_weights(self) -> None:
        """One pass over the source: start, update, finish."""

    def abort(self) -> None:
        """Ends a transfer that hangs. Called from another thread, possibly more than once."""

    def shutdown(self) -> None: ...


class Transport(Protocol):
    def join(self, client: WeightSyncClient, source: WeightSource, workers: int) -> WeightSender:
        """Forms a group of the trainer and so many workers."""


def in_background(call: Callable[..., T], *arguments: Any) -> "Future[T]":
    """Runs a call in a thread of its own, while the caller takes part in the same collective operation.
    The thread is never joined: a call into NCCL that does not return cannot be ended."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = call(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future
