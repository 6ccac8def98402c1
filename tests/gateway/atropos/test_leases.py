"""A batch is handed out again until a client has read all of it."""

import http.client
import json
import socket
from collections.abc import Callable

import pytest

from tests.gateway.atropos.running import RunningAtropos, scored, until

pytestmark = pytest.mark.broker

ASK = b"GET /batch HTTP/1.1\r\nHost: x\r\n\r\n"
ASK_ONCE = b"GET /batch HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture
def filled(atropos: RunningAtropos) -> RunningAtropos:
    """Two batches wait, of a group each. They fit into the buffers of the connection."""
    atropos.begin(batch_size=4)
    for score in range(2):
        atropos.post("/scored_data", scored(score, tokens=2_000))
    return atropos


def delivered(atropos: RunningAtropos) -> Callable[[], float]:
    """How many batches were delivered from now on."""
    before = atropos.metric("atropos_batches_total")
    return lambda: atropos.metric("atropos_batches_total") - before


def read_a_little(atropos: RunningAtropos, request: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", atropos.port))
    client.sendall(request)
    assert client.recv(300).startswith(b"HTTP/1.1 200")
    return client


@pytest.mark.parametrize("request_", [ASK, ASK_ONCE], ids=["keep-alive", "close"])
def test_a_client_that_closes_after_a_few_bytes_loses_nothing(
    filled: RunningAtropos, request_: bytes
) -> None:
    broken = filled.metric("atropos_broken_off_batches_total")
    read_a_little(filled, request_).close()
    until(lambda: filled.metric("atropos_broken_off_batches_total") > broken)
    assert [filled.batch_scores() for _ in range(3)] == [[[0.0] * 4], [[1.0] * 4], None]
    assert filled.get("/status")["current_step"] == 2


def test_a_batch_that_is_being_read_is_not_handed_to_another_client(
    filled: RunningAtropos,
) -> None:
    with read_a_little(filled, ASK):
        assert filled.batch_scores() == [[1.0] * 4]
        assert filled.batch_scores() is None
    until(lambda: filled.batch_scores() == [[0.0] * 4])


def test_the_next_request_of_a_connection_says_that_the_batch_was_read(
    filled: RunningAtropos,
) -> None:
    count = delivered(filled)
    client = http.client.HTTPConnection("127.0.0.1", filled.port)
    for score in range(2):
        client.request("GET", "/batch")
        (group,) = json.loads(client.getresponse().read())["batch"]
        assert group["scores"] == [score] * 4
        until(lambda score=score: count() == score)  # type: ignore[misc]
    client.close()
    until(lambda: count() == 2)


def test_a_client_that_reads_until_the_connection_closes_gets_its_batch_once(
    filled: RunningAtropos,
) -> None:
    count = delivered(filled)
    with socket.create_connection(("127.0.0.1", filled.port)) as client:
        client.sendall(ASK_ONCE)
        parts = []
        while part := client.recv(1 << 16):
            parts.append(part)
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    (group,) = json.loads(body)["batch"]
    assert group["scores"] == [0.0] * 4
    until(lambda: count() == 1)
    assert filled.batch_scores() == [[1.0] * 4]
