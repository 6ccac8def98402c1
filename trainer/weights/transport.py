"""What every way of sending weights looks like to the fleet.

The shape is that of vLLM's trainer side: a transport brings the trainer and the workers of some
engines into one process group, in which the trainer is rank 0; what it gives sends the weights once
per call. Both drive the engines through a client, whose calls go to all engines of the group.
Whatever breaks a group ends in `TransportFailed` or in an error of the client, never in a hang.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from trainer.weights.source import Source

T = TypeVar("T")


class TransportFailed(Exception):
    """The group broke or did not come together; its members say why, if they can."""


class Client(Protocol):
    """vLLM's `VLLMWeightSyncClient`."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class Sender(Protocol):
    """A group that has come together."""

    def send_weights(self) -> None:
        """One pass over the source: start, update, finish."""

    def abort(self) -> None:
        """Ends a transfer that hangs; called from another thread, perhaps more than once."""

    def shutdown(self) -> None: ...


class Transport(Protocol):
    def join(self, client: Client, source: Source, workers: int) -> Sender:
        """Makes a group of the trainer and so many workers."""


def in_background(call: Callable[..., T], *arguments: Any) -> "Future[T]":
    """Runs a call beside our own part, with which it meets in the group. Nobody waits for its thread:
    a call into NCCL that does not return cannot be ended."""
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
