"""A trainer of Atropos pulls what agents behind our own gateway did."""

import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from pool import topics
from pool.connection import Connection
from schemas import Record, Step
from schemas.packing import unpack_ids, unpack_logprobs
from steplog.kafka import local_kafka
from tests.gateway.atropos.running import RunningAtropos, running_atropos, scored, until
from tests.gateway.atropos.test_restarts import post_as_clients_do
from tests.pool.records import end, step
from tests.trainer.agents import RUN, group, submit

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def log(kafka: local_kafka.Broker) -> Connection:
    shared = Connection(bootstrap=kafka.bootstrap, topic_prefix=f"agents-{uuid.uuid4().hex[:8]}.")
    topics.create(shared, partitions=1)
    return shared


@pytest.fixture(scope="module")
def _server(log: Connection) -> Iterator[RunningAtropos]:
    with running_atropos(log, "--run", RUN, "--serve-agents", "--group-size", "4") as running:
        yield running


@pytest.fixture
def atropos(_server: RunningAtropos) -> RunningAtropos:
    _server.reset()
    return _server


def write(log: Connection, records: Sequence[Record], age_s: float = 0) -> None:
    born = int((time.time() - age_s) * 1000)
    submit(log, [msgspec.structs.replace(record, created_at=born) for record in records])


def batch(atropos: RunningAtropos) -> list[Any]:
    """The next one, when there is enough for it."""
    found: list[Any] = []

    def is_there() -> bool:
        found[:] = atropos.get("/batch")["batch"] or []
        return bool(found)

    until(is_there)
    return found


def whole(uid: str, prompt: str, reward: float, *steps: Step, **fields: Any) -> list[Record]:
    return [*steps, end(uid, prompt, steps=len(steps), reward=reward, **fields)]


def one_step(uid: str, prompt: str, reward: float, **fields: Any) -> list[Record]:
    return whole(uid, prompt, reward, step(f"{uid}-0", uid, prompt), **fields)


def agent_group(prompt: str, rewards: Sequence[float]) -> list[Record]:
    parts = [one_step(f"{prompt}-{reward}", prompt, reward) for reward in rewards]
    return [record for part in parts for record in part]


def test_groups_come_as_they_were_sampled(atropos: RunningAtropos, log: Connection) -> None:
    atropos.begin(batch_size=8)
    records = group("first") + group("second", rewards=[0.25, 0.5, 0.75, 1.0])
    write(log, records)
    told = batch(atropos)
    assert [one["scores"] for one in told] == [[0.0, 1.0, 0.0, 1.0], [0.25, 0.5, 0.75, 1.0]]
    assert all(one["env_id"] is None and one["advantages"] is None for one in told)
    rows = [
        row
        for one in told
        for row in zip(one["tokens"], one["masks"], one["inference_logprobs"], strict=True)
    ]
    steps = [record for record in records if isinstance(record, Step)]
    for (tokens, mask, logprobs), sampled in zip(rows, steps, strict=True):
        prompt = unpack_ids(sampled.prompt_ids).tolist()
        response = unpack_ids(sampled.response_ids).tolist()
        assert tokens == prompt + response
        assert mask == [-100] * len(prompt) + response
        assert logprobs == [1.0] * len(prompt) + unpack_logprobs(sampled.response_logprobs).tolist()
    assert atropos.get("/status") == {"current_step": 1, "queue_size": 0}


def test_turns_are_one_sequence_and_rewritten_history_is_another(
    atropos: RunningAtropos, log: Connection
) -> None:
    atropos.begin(batch_size=3)
    turns = (
        step("turns-0", "turns", "talk", ids=[1, 2], response=[3, 4], group_size=2),
        step("turns-1", "turns", "talk", index=1, ids=[1, 2, 3, 4, 50], response=[5]),
    )
    rewritten = (
        step("new-0", "new", "talk", ids=[1, 2], response=[6]),
        step("new-1", "new", "talk", index=1, ids=[1, 9], response=[7]),
    )
    write(log, whole("turns", "talk", 1.0, *turns) + whole("new", "talk", 0.5, *rewritten))
    (told,) = batch(atropos)
    assert told["tokens"] == [[1, 2, 3, 4, 50, 5], [1, 2, 6], [1, 9, 7]]
    assert told["masks"] == [[-100, -100, 3, 4, -100, 5], [-100, -100, 6], [-100, -100, 7]]
    assert told["inference_logprobs"] == [[1, 1, -0.5, -0.5, 1, -0.5], [1, 1, -0.5], [1, 1, -0.5]]
    assert told["scores"] == [1.0, 0.5, 0.5]


def test_what_cannot_be_trained_is_left_out(atropos: RunningAtropos, log: Connection) -> None:
    atropos.begin(batch_size=2)
    before = atropos.metric("atropos_left_out_groups_total")
    lonely = [one_step(f"l{n}", "lonely", 1.0, status="failed") for n in range(3)]
    others = [one_step(f"e{n}", "others", 1.0, run="another") for n in range(4)]
    evaluated = [one_step(f"v{n}", "evaluated", 1.0, channel="eval") for n in range(4)]
    shrunk = [one_step(f"s{n}", "shrunk", float(n)) for n in range(2)]
    cancelled = [one_step(f"c{n}", "shrunk", 9.0, status="cancelled") for n in range(2)]
    parts = [*lonely, one_step("l3", "lonely", 1.0), *others, *evaluated, *cancelled, *shrunk]
    write(log, [record for part in parts for record in part])
    assert [one["scores"] for one in batch(atropos)] == [[0.0, 1.0]]
    assert atropos.metric("atropos_left_out_groups_total") == before + 1
    assert atropos.get("/status")["queue_size"] == 0


def test_an_incomplete_group_comes_after_its_deadline_and_not_again(
    atropos: RunningAtropos, log: Connection
) -> None:
    """A group that stays open has all of this read again by the next server."""
    atropos.begin(batch_size=3)
    write(log, one_step("open", "stays open", 1.0))
    write(log, agent_group("again", [0.0, 1.0, 2.0]), age_s=4000)
    assert [one["scores"] for one in batch(atropos)] == [[0.0, 1.0, 2.0]]
    atropos.get("/reset_data")
    atropos.begin(batch_size=4)
    for epoch in (1, 2):
        atropos.kill_server(handed=1)
        rewards = [10.0 * epoch + n for n in range(4)]
        write(log, agent_group("again", rewards))
        assert [one["scores"] for one in batch(atropos)] == [rewards]
    assert atropos.get("/status") == {"current_step": 2, "queue_size": 0}


def test_groups_of_agents_and_environments_come_exactly_once_while_servers_die(
    atropos: RunningAtropos, log: Connection
) -> None:
    atropos.begin(batch_size=4)
    over = threading.Event()
    written: list[float] = []
    posted: list[float] = []

    def keep_writing() -> None:
        while not over.is_set():
            names = [float(len(written) + n) for n in range(5)]
            write(log, [r for name in names for r in group(f"k{name}", rewards=[name] * 4)])
            written.extend(names)

    def keep_posting() -> None:
        while not over.is_set():
            name = 1_000_000.0 + len(posted)
            post_as_clients_do(atropos, "/scored_data", scored(name))
            posted.append(name)
            over.wait(0.01)

    threads = [threading.Thread(target=work) for work in (keep_writing, keep_posting)]
    for thread in threads:
        thread.start()
    pulled: list[float] = []
    for _ in range(3):
        before = len(posted)
        pulled += [batch(atropos)[0]["scores"][0] for _ in range(5)]
        until(lambda before=before: len(posted) > before)  # type: ignore[misc]
        atropos.kill_server(handed=5)
    over.set()
    for thread in threads:
        thread.join()
    while len(pulled) < len(written) + len(posted):
        pulled.append(batch(atropos)[0]["scores"][0])
    assert Counter(pulled) == Counter(written + posted)
    assert [name for name in pulled if name < 1_000_000] == written, "the order of the log"
    assert atropos.get("/status")["queue_size"] == 0
