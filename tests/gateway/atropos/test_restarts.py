"""Servers are killed at any moment: nothing is lost, nothing comes twice, and clients do not notice."""

import json
import random
import socket
import threading
import time
from collections import Counter
from http.client import HTTPException
from typing import Any

import pytest

from pool import topics
from pool.connection import Connection
from tests.gateway.atropos.running import RunningAtropos, running_atropos, scored, until

pytestmark = [pytest.mark.broker, pytest.mark.slow]

TRIES = 3
"""Of a stock client, before it drops a group."""


@pytest.fixture
def log(connection: Connection) -> Connection:
    topics.create(connection, partitions=3)
    return connection


def post_as_clients_do(atropos: RunningAtropos, path: str, body: Any) -> None:
    """Who kills meanwhile must let it come to its end before the third time."""
    for left in reversed(range(TRIES)):
        try:
            assert atropos.ask("POST", path, body).status == 200
            return
        except (OSError, HTTPException):  # the latter: it was killed between head and body
            assert left, "a client would have dropped its group"
            time.sleep(random.uniform(0, 0.5))


def drained(atropos: RunningAtropos) -> list[float]:
    """The score of every group that waits, in the order in which they come."""
    found = []
    while scores := atropos.batch_scores():
        found += [group[0] for group in scores]
    return found


def test_groups_posted_while_servers_die_come_exactly_once(atropos: RunningAtropos) -> None:
    atropos.begin(batch_size=4)
    posters, kills = 4, 5
    over = threading.Event()
    posted: list[list[float]] = [[] for _ in range(posters)]
    failures: list[BaseException] = []

    def have_posted(before: list[int], more: int) -> bool:
        return all(len(now) >= then + more for now, then in zip(posted, before, strict=True))

    def keep_posting(poster: int) -> None:
        score = poster * 1_000_000.0
        while not over.is_set():
            try:
                if score % 5:
                    post_as_clients_do(atropos, "/scored_data", scored(score))
                    posted[poster].append(score)
                else:
                    pair = [scored(score), scored(score)]
                    post_as_clients_do(atropos, "/scored_data_list", pair)
                    posted[poster] += [score, score]
            except BaseException as failure:
                failures.append(failure)
                return
            score += 1

    threads = [threading.Thread(target=keep_posting, args=(n,)) for n in range(posters)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(kills):
            before = [len(scores) for scores in posted]
            until(lambda before=before: have_posted(before, 10) or bool(failures))  # type: ignore[misc]
            assert not failures
            atropos.kill_server()
            atropos.wait_until_ready()
            atropos.kill_server()  # often before those have come again who got no answer
    finally:
        over.set()
    for thread in threads:
        thread.join()
    assert not failures
    expected = Counter(score for scores in posted for score in scores)
    assert Counter(drained(atropos)) == expected


def test_an_environment_keeps_its_id_and_its_numbers(atropos: RunningAtropos) -> None:
    atropos.begin(batch_size=8, starting_step=5)
    env_id = atropos.join(min_batch_allocation=0.25)
    for score, size in enumerate((4, 4, 4, 3, 3)):
        atropos.post("/scored_data", scored(score, size, env_id))
    atropos.get("/batch")
    asked = ("/status", "/info", "/wandb_info", "/latest_example")
    before = [atropos.get(path) for path in asked]
    polled = atropos.get("/status-env", {"env_id": env_id})
    assert polled["current_step"] == 6
    atropos.kill_server(handed=1)
    assert atropos.get("/status-env", {"env_id": env_id}) == polled
    assert [atropos.get(path) for path in asked] == before
    # The buffer, too: 3 and 3 wait for a 1.
    told = atropos.post("/scored_data", scored(9, 1, env_id))
    assert told == {"status": "buffered", "buffer_size": 3}
    assert atropos.join() == env_id + 1


def test_all_processes_die_and_others_go_on(log: Connection) -> None:
    with running_atropos(log) as atropos:
        atropos.begin(batch_size=4)
        for score in range(3):
            atropos.post("/scored_data", scored(score))
        assert atropos.batch_scores() == [[0.0] * 4]
        until(lambda: atropos.metric("atropos_batches_total") == 1)
        atropos.kill_all()
    with running_atropos(log) as atropos:
        assert atropos.get("/status") == {"current_step": 1, "queue_size": 2}
        assert drained(atropos) == [1.0, 2.0]


def test_a_supervisor_that_dies_takes_its_server_with_it(log: Connection) -> None:
    with running_atropos(log) as atropos:
        atropos.process.kill()
        atropos.process.wait()

        def is_free() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", atropos.port)) != 0

        until(is_free)


def test_the_last_server_that_is_started_serves_the_run(log: Connection) -> None:
    with running_atropos(log) as first:
        first.begin(batch_size=4)
        first.post("/scored_data", scored(1))
        with running_atropos(log) as second:
            assert first.process.wait(60) == 1
            told = first.log.read_text()
            assert "steplog: another `steplog atropos` has taken over run default" in told
            assert drained(second) == [1.0]
            assert second.stop() != 1


def test_a_broken_answer_makes_an_equal_post_a_retry_once(atropos: RunningAtropos) -> None:
    atropos.begin(batch_size=4)
    body = json.dumps(scored(7)).encode()
    before = atropos.metric("atropos_retries_total")
    for _ in range(2):  # two on purpose
        atropos.ask("POST", "/scored_data", body)
    _post_and_go(atropos, body)
    until(lambda: atropos.get("/status")["queue_size"] == 3)
    for _ in range(2):  # the retry, and another on purpose
        assert atropos.ask("POST", "/scored_data", body).body == {"status": "received"}
    assert atropos.metric("atropos_retries_total") == before + 1
    assert drained(atropos) == [7.0] * 4


def _post_and_go(atropos: RunningAtropos, body: bytes) -> None:
    """A client that is gone before its answer."""
    with socket.create_connection(("127.0.0.1", atropos.port)) as client:
        head = f"POST /scored_data HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def _begin_batch(atropos: RunningAtropos, then: bytes = b"") -> socket.socket:
    """A client that has read a little of a batch which no buffer between us holds; it may have asked
    for more at once."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", atropos.port))
    client.sendall(b"GET /batch HTTP/1.1\r\nHost: x\r\n\r\n" + then)
    assert client.recv(1024).startswith(b"HTTP/1.1 200")
    return client


@pytest.mark.parametrize("who", ["client", "client that asked for more", "server"])
def test_a_batch_that_breaks_off_is_sent_again(atropos: RunningAtropos, who: str) -> None:
    atropos.begin(batch_size=4)
    for score in range(2):
        atropos.post("/scored_data", scored(score, tokens=200_000))
    before = atropos.metric("atropos_broken_off_batches_total")
    more = b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n" if "more" in who else b""
    client = _begin_batch(atropos, more)
    if who == "server":
        atropos.kill_server()
    client.close()
    if who != "server":
        until(lambda: atropos.metric("atropos_broken_off_batches_total") > before)
    assert atropos.batch_scores() == [[0.0] * 4]
    assert atropos.batch_scores() == [[1.0] * 4]
    assert atropos.batch_scores() is None
    assert atropos.get("/status")["current_step"] == 2
