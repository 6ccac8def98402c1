"""Requests to a running gateway, and its log read incrementally, for tests."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec

from pool.connection import Connection
from pool.core.prompts import full_prompts
from pool.topics import STEPS
from schemas import Feedback, Position, Record, Registration, Step, StepNote, TrajectoryEnd
from schemas.packing import unpack_ids
from tests.gateway.running import Reply, RunningGateway
from tests.gateway.stub_engine import StubEngine
from tests.tiny_model import EOS, IDS

T = TypeVar("T")
Json = dict[str, Any]

HELLO: Any = [{"role": "user", "content": "hello"}]
LIMIT_S = 60.0
POLL_S = 0.02
RETRY = {"x-stainless-retry-count": "1"}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look it up.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]


def eventually(look: Callable[[], T], limit: float = LIMIT_S) -> T:
    """What `look` finds, once it finds something."""
    deadline = time.monotonic() + limit
    while not (found := look()):
        assert time.monotonic() < deadline, f"it did not happen within {limit:g} s"
        time.sleep(POLL_S)
    return found


def said(text: str, end: int | None = EOS, **more: Any) -> Json:
    """A line of the stub's script: the ids of a text, with markers as single ids."""
    return {"ids": ids_of(text) + ([] if end is None else [end]), **more}


def ids_of(text: str) -> list[int]:
    """As the tiny tokenizer has them: bytes, and markers above."""
    ids: list[int] = []
    while text:
        marker = next((name for name in IDS if text.startswith(name)), None)
        ids += [IDS[marker]] if marker else list(text[0].encode())
        text = text[len(marker) if marker else 1 :]
    return ids


def call(name: str, arguments: str, space: str = " ") -> str:
    """A tool call as a model writes it."""
    said = f'{{"name":{space}"{name}",{space}"arguments":{space}{arguments}}}'
    return f"<tool_call>\n{said}\n</tool_call>"


def chat(
    gateway: RunningGateway,
    uid: str,
    prompt_uid: str,
    messages: Any = HELLO,
    headers: dict[str, str] | None = None,
    limit: float = 60,
    **body: Any,
) -> Reply:
    """A chat call without a client in between."""
    path = f"/{uid}/{prompt_uid}/v1/chat/completions"
    return gateway.post(path, {"messages": messages, **body}, headers, limit)


def text(reply: Reply) -> str:
    assert reply.status == 200, reply
    return str(reply.body["choices"][0]["message"]["content"])


def error(reply: Reply) -> Json:
    """The error of a refusal, which must be in OpenAI's shape."""
    assert reply.status >= 400, reply
    assert set(reply.body) == {"error"}, reply
    found: Json = reply.body["error"]
    assert set(found) == {"message", "type", "param", "code"}, reply
    assert isinstance(found["message"], str) and found["message"]
    assert isinstance(found["type"], str)
    return found


@contextmanager
def in_background() -> Iterator[Callable[..., "Future[Any]"]]:
    """Runs calls at the same time as the test."""
    with ThreadPoolExecutor(32) as pool:
        yield pool.submit


class Streaming:
    """A streamed call whose events are read one by one, and that can be left."""

    def __init__(self, gateway: RunningGateway, path: str, body: Json, **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        sent = {"content-type": "application/json", **headers}
        self._connection.request("POST", path, json.dumps(body), sent)

    def events(self) -> Iterator[str]:
        with self._connection.getresponse() as response:
            assert response.status == 200, response.read()
            for line in response:
                if line.startswith(b"data: "):
                    yield line[6:].decode().strip()
        self.leave()

    def leave(self) -> None:
        """Closes the connection under the gateway."""
        self._connection.close()


def leave_early(gateway: RunningGateway, stub: StubEngine, path: str, body: Json) -> None:
    """Sends a call, and goes away when the engine has it, which must hold its answer by the script."""
    before = stub.waiting()
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    eventually(lambda: stub.waiting() < before)
    connection.close()


# The log


class Seen(NamedTuple):
    place: Position
    record: Record


class Topic:
    """A topic that is read on from where it was read last."""

    def __init__(self, connection: Connection, topic: str) -> None:
        self._codec = connection.codec()
        self._connection = connection
        # A consumer's own question for the ends would wait behind its fetches.
        self._admin = AdminClient(connection.confluent())
        self._consumer = Consumer(connection.confluent(group_id="tests", enable_auto_commit=False))
        name = connection.topic_name(topic)
        about = self._consumer.list_topics(name, timeout=LIMIT_S).topics[name]
        self._places = [TopicPartition(name, number, 0) for number in about.partitions]
        self._consumer.assign(self._places)
        self._next = dict.fromkeys(about.partitions, 0)
        self._seen: list[Seen] = []
        self._turn = threading.Lock()

    def read(self) -> list[Seen]:
        """All that it holds now."""
        with self._turn:
            ends = self._now()
            deadline = time.monotonic() + LIMIT_S
            while any(self._next[number] < end for number, end in ends.items()):
                assert time.monotonic() < deadline
                for message in self._consumer.consume(1000, 0.02):
                    assert message.error() is None, message.error()
                    self._take(message.partition(), message.offset(), message.value())
            return sorted(self._seen, key=lambda seen: seen.place)

    def _now(self) -> dict[int, int]:
        """A lone broker that got no processor for seconds leads its partitions anew, and a client that
        knows the old leader is refused."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                return self._ends()
            except KafkaException:
                assert time.monotonic() < deadline
                self._admin = AdminClient(self._connection.confluent())
                time.sleep(POLL_S)

    def _ends(self) -> dict[int, int]:
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        found = self._admin.list_offsets(
            {TopicPartition(p.topic, p.partition): latest for p in self._places}
        )
        return {place.partition: future.result(10).offset for place, future in found.items()}

    def _take(self, partition: int | None, offset: int | None, value: Any) -> None:
        assert partition is not None and offset is not None
        self._next[partition] = offset + 1
        place = Position(partition=partition, offset=offset)
        self._seen.append(Seen(place, self._codec.decode(value)))

    def close(self) -> None:
        self._consumer.close()


_open: dict[tuple[str, str, str], Topic] = {}


def log_of(gateway: RunningGateway, uid: str, topic: str = STEPS) -> list[Record]:
    """The records of a trajectory, in their order."""
    connection = gateway.connection
    key = connection.bootstrap, connection.topic_prefix, topic
    if key not in _open:
        _open[key] = Topic(connection, topic)
    found = [seen.record for seen in _open[key].read()]
    return [record for record in found if getattr(record, "trajectory_uid", None) == uid]


def close_topics() -> None:
    while _open:
        _open.popitem()[1].close()


def steps(gateway: RunningGateway, uid: str) -> list[Step]:
    return [record for record in log_of(gateway, uid) if isinstance(record, Step)]


def only_step(gateway: RunningGateway, uid: str) -> Step:
    (step,) = steps(gateway, uid)
    return step


def ends(gateway: RunningGateway, uid: str) -> list[TrajectoryEnd]:
    return [record for record in log_of(gateway, uid) if isinstance(record, TrajectoryEnd)]


def notes(gateway: RunningGateway, uid: str) -> list[StepNote]:
    return [record for record in log_of(gateway, uid) if isinstance(record, StepNote)]


def feedback(gateway: RunningGateway, uid: str) -> list[Feedback]:
    return [record for record in log_of(gateway, uid) if isinstance(record, Feedback)]


def registrations(gateway: RunningGateway, uid: str) -> list[Registration]:
    found = log_of(gateway, uid, "trajectories")
    return [record for record in found if isinstance(record, Registration)]


def prompts(gateway: RunningGateway, uid: str) -> list[list[int]]:
    """Every Step's prompt in full, as readers of the log get it."""
    whole = full_prompts(steps(gateway, uid))
    return [list(unpack_ids(prompt)) for prompt in whole.values()]


def response(step: Step) -> list[int]:
    return list(unpack_ids(step.response_ids))


def asked(stub: StubEngine, count: int = 1) -> list[list[int]]:
    """The prompts of the last calls that the engine got."""
    return [body["token_ids"] for body in stub.requests()[-count:]]
