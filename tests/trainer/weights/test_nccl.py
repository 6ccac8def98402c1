"""The NCCL side without a GPU: what is done about its silences."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.weights.nccl import GuardedCommunicator, NcclSender, NcclTransport, NcclUnavailable
from trainer.weights.settings import WeightsSettings
from trainer.weights.transport import TransportFailed

JOIN_S = 60.0
"""Long enough that nothing here ends because of it, unless it is meant to."""


class Refusing:
    def init_weight_transfer_engine(self, _: dict[str, Any]) -> None:
        raise ConnectionError("the engine is gone")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr("trainer.weights.nccl.GRACE_S", 0.1)


def joined(
    monkeypatch: pytest.MonkeyPatch, make: Any, client: Any = None, join_s: float = JOIN_S
) -> Any:
    monkeypatch.setattr(NcclTransport, "_make", make)
    settings = WeightsSettings(weights_transport="nccl", weights_join_s=join_s)
    return NcclTransport(settings).join(client, [], 1)  # type: ignore[arg-type]


def test_a_library_that_vllm_cannot_use_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every broadcast would do nothing, and every engine would confirm what it never got."""
    engine = SimpleNamespace(model_update_group=SimpleNamespace(disabled=True))
    with pytest.raises(NcclUnavailable, match="found no usable NCCL library"):
        joined(monkeypatch, lambda *_: engine)


def test_a_group_that_does_not_come_together_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransportFailed, match="could not be formed in time"):
        joined(monkeypatch, lambda *_: threading.Event().wait(), join_s=0.1)


def test_an_engine_that_fails_to_join_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(_: Any, client: Any, *__: Any) -> None:
        threading.Thread(target=lambda: refused(client), daemon=True).start()
        threading.Event().wait()  # as ncclCommInitRank does

    def refused(client: Any) -> None:
        with pytest.raises(ConnectionError):
            client.init_weight_transfer_engine({})

    started = time.monotonic()
    with pytest.raises(ConnectionError, match="the engine is gone"):
        joined(monkeypatch, make, Refusing())
    assert time.monotonic() - started < JOIN_S


def test_a_transfer_that_is_ended_tells_the_workers_first() -> None:
    did: list[Any] = []
    group = SimpleNamespace(disabled=False)
    group.group = SimpleNamespace(store=SimpleNamespace(set=lambda *told: did.append(told)))

    def destroy() -> None:
        did.append("aborted")
        group.disabled = True

    group.destroy = destroy
    sender = NcclSender(SimpleNamespace(model_update_group=group))
    sender.abort()
    sender.abort()
    sender.shutdown()
    assert did == [("steplog/given up", b"1"), "aborted"]


def test_whoever_comes_back_from_an_ended_broadcast_cannot_begin_another() -> None:
    """The communicator's memory is gone by then."""
    sent: list[int] = []
    group = SimpleNamespace(
        broadcast=lambda tensor, src, stream: sent.append(src), destroy=lambda: None
    )
    guarded = GuardedCommunicator(group)
    guarded.broadcast(torch.zeros(1), 0)
    guarded.end()
    with pytest.raises(RuntimeError, match="was aborted"):
        guarded.broadcast(torch.zeros(1), 0)
    assert sent == [0]
