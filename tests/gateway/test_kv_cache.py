"""The salt under which calls find keys and values in an engine's cache, and what Steps say about it."""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gateway.engines.kv_cache import choose_salt, mark_kept
from pool import topics
from pool.connection import Connection
from pool.core.versions import Version
from pool.topics import POLICY
from schemas import PolicyVersion, Segment
from schemas.records import Phase
from steplog.kafka import local_kafka
from tests.gateway.client import chat, eventually, steps
from tests.gateway.running import RunningGateway, running_gateway
from tests.gateway.stub_engine import StubEngine, running_stub
from tests.pool.log import write


@pytest.mark.parametrize(
    ("engine", "began", "keep_kv", "salt"),
    [
        ((1, 7), None, True, (1, 7)),
        ((1, 7), (1, 5), False, (1, 7)),
        ((1, 7), (1, 5), True, (1, 5)),
        # An engine that is behind stores what is older than the trajectory's beginning.
        ((1, 4), (1, 5), True, (1, 4)),
        # A new incarnation empties the caches.
        ((2, 7), (1, 5), True, (2, 7)),
    ],
)
def test_the_salt_of_a_call(
    engine: tuple[int, int], began: tuple[int, int] | None, keep_kv: bool, salt: tuple[int, int]
) -> None:
    chosen = choose_salt(Version(*engine), Version(*began) if began else None, keep_kv)
    assert chosen == salt


def test_only_tokens_newer_than_the_salt_are_marked() -> None:
    def segment(version: int, first_token: int, kv_version: int | None = None) -> Segment:
        return Segment(
            incarnation=1, version=version, first_token=first_token, kv_version=kv_version
        )

    marked = mark_kept([segment(5, 0), segment(6, 9)], Version(1, 5))
    assert marked == [segment(5, 0), segment(6, 9, kv_version=5)]
    assert mark_kept([segment(5, 0)], Version(2, 1)) == [segment(5, 0)]


class Training:
    """A trainer that keeps the caches of one engine, and a gateway in front of it."""

    def __init__(self, connection: Connection, tokenizer: Path, stack: ExitStack) -> None:
        self.engine = stack.enter_context(running_stub(tokens=8))
        self._connection = connection
        self._tokenizer = tokenizer
        self._stack = stack

    def start(self) -> RunningGateway:
        gateway = running_gateway(self._connection, [self.engine.url], self._tokenizer)
        return self._stack.enter_context(gateway)

    def write(self, phase: Phase, version: int) -> None:
        record = PolicyVersion(
            run="default", incarnation=1, version=version, phase=phase, keep_kv=phase == "started"
        )
        write(self._connection, POLICY, [record])

    def update(self, version: int) -> None:
        self.write("opened", version)
        self.engine.set_version(f"1.{version}")
        self.write("live", version)


@pytest.fixture
def training(kafka: local_kafka.Broker, tokenizer: Path) -> Iterator[Training]:
    connection = Connection(bootstrap=kafka.bootstrap, topic_prefix=f"kv-{uuid.uuid4().hex[:8]}.")
    topics.create(connection, partitions=1)
    with ExitStack() as stack:
        yield Training(connection, tokenizer, stack)


def last_salt(engine: StubEngine) -> str:
    return str(engine.requests()[-1]["cache_salt"])


@pytest.mark.broker
def test_a_trajectory_keeps_the_cache_of_its_beginning_over_an_update_and_a_kill(
    training: Training, uid: str, prompt_uid: str
) -> None:
    """It starts a gateway, because the salt comes back from the log."""
    training.write("started", 1)
    training.update(1)
    gateway = training.start()
    chat(gateway, uid, prompt_uid)
    training.update(2)

    def knows_of_the_update() -> bool:
        assert chat(gateway, uuid.uuid4().hex, prompt_uid).status == 200
        return last_salt(training.engine) == "1.2"

    eventually(knows_of_the_update)
    chat(gateway, uid, prompt_uid)
    assert last_salt(training.engine) == "1.1"
    gateway.kill()
    gateway = training.start()
    chat(gateway, uid, prompt_uid)
    assert last_salt(training.engine) == "1.1"
    versions = [
        (step.segments[0].version, step.segments[0].kv_version) for step in steps(gateway, uid)
    ]
    assert versions == [(1, None), (2, 1), (2, 1)]
