"""The gateway under faults, by their names in reliability.md; I1 and I2 hold after each of them."""

import signal
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from random import Random

import psutil
import pytest

from pool import topics
from pool.connection import Connection
from pool.core.trajectories import step_of
from pool.topics import TRAJECTORIES
from schemas import Registration, Step, TrajectoryEnd
from steplog.kafka import local_kafka
from tests.gateway.echo_engine import running_echo
from tests.gateway.load import Load, Sent, wait_until
from tests.gateway.own_broker import OwnBroker, own_broker
from tests.gateway.recorded import TEXT, Recorded
from tests.gateway.running import RunningGateway, running_gateway
from tests.gateway.stub_engine import StubEngine
from tests.tiny_model import EOS

pytestmark = pytest.mark.broker

NOTICED = 25.0
"""Seconds within which the gateway knows that its broker does not answer. Calls give up by themselves
after 30."""
HEALED = 60.0
"""Seconds within which everything goes on after a fault has gone (I10)."""
GIVEN_UP = 30.0
"""Seconds within which a connection is replaced that has gone silent. Kafka's clients would take 60."""
MEGABYTE = 1024 * 1024
CUT = ("ServerDisconnectedError", "ClientOSError", "ClientConnectorError", "ClientPayloadError")
"""What agents see of a process that dies; of a stream, that it is broken."""
HELLO = {"model": "default", "messages": [{"role": "user", "content": "[[hello]]"}]}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnBroker]:
    with own_broker(tmp_path_factory.mktemp("own-broker")) as running:
        yield running


@pytest.fixture(scope="module")
def echo() -> Iterator[StubEngine]:
    with running_echo(delay=0.1) as engine:
        yield engine


@pytest.fixture
def faulty(broker: OwnBroker, echo: StubEngine, tokenizer: Path) -> Iterator[RunningGateway]:
    """A gateway whose broker is ours to break."""
    broker.proxy.heal()
    connection = broker.connection(f"fault-{uuid.uuid4().hex[:8]}.")
    topics.create(broker.past_the_proxy(connection))
    with running_gateway(connection, [echo.url], tokenizer) as gateway:
        yield gateway
    broker.proxy.heal()


@pytest.fixture
def own_log(kafka: local_kafka.Broker) -> Connection:
    connection = Connection(bootstrap=kafka.bootstrap, topic_prefix=f"f-{uuid.uuid4().hex[:8]}.")
    topics.create(connection)
    return connection


def is_ready(gateway: RunningGateway) -> bool:
    return gateway.get("/ready").status == 200


def wait_until_refused(gateway: RunningGateway, load: Load) -> None:
    """The gateway knows that it cannot record, and says so to probes and agents."""
    since = time.monotonic()
    wait_until(lambda: not is_ready(gateway), NOTICED)
    wait_until(lambda: 503 in load.outcomes(since), NOTICED)


def check_recovered(gateway: RunningGateway, load: Load, limit: float = HEALED) -> None:
    wait_until(lambda: is_ready(gateway), limit)
    load.wait_for_answers(40)
    assert gateway.process.poll() is None, "it went on, but as another process"


def check_refusals(load: Load) -> None:
    """Agents met nothing but answers and requests to wait."""
    odd = [a for a in load.attempts() if a.outcome not in (200, 503, "Broken")]
    assert not odd, odd[:3]
    assert all(a.retry_after for a in load.attempts() if a.outcome == 503)
    broken = [a for a in load.attempts() if a.outcome == "Broken"]
    assert all("error" in a.said for a in broken), broken[:3]  # a stream that ended with one
    unanswered = [sent for sent in load.sent if sent.step_id is None]
    assert not unanswered, unanswered[:3]


def recorded(broker: OwnBroker, gateway: RunningGateway) -> Recorded:
    return Recorded(broker.past_the_proxy(gateway.connection))


@pytest.mark.slow
def test_f1_a_broker_that_is_killed_and_restarted_loses_no_answer(
    broker: OwnBroker, faulty: RunningGateway
) -> None:
    with Load(faulty.url, agents=12) as load:
        for _ in range(3):
            load.wait_for_answers(40)
            broker.kill()
            wait_until_refused(faulty, load)
            broker.start()
            check_recovered(faulty, load)
    check_refusals(load)
    recorded(broker, faulty).check(load.sent, load.completed)


@pytest.mark.slow
def test_f1_an_idle_gateway_knows_that_its_broker_is_gone(
    broker: OwnBroker, faulty: RunningGateway
) -> None:
    broker.kill()
    try:
        wait_until(lambda: not is_ready(faulty), NOTICED)
        reply = faulty.post("/new/prompt/v1/chat/completions", HELLO, limit=NOTICED)
        assert (reply.status, reply.body["error"]["type"]) == (503, "server_error")
        assert reply.headers["retry-after"]
    finally:
        broker.start()
    wait_until(lambda: is_ready(faulty), HEALED)
    assert faulty.post("/new/prompt/v1/chat/completions", HELLO).status == 200


@pytest.mark.slow
def test_f2_a_broker_that_stands_still_costs_no_answer_and_no_speed_later(
    broker: OwnBroker, faulty: RunningGateway
) -> None:
    with Load(faulty.url, agents=12) as load:
        load.wait_for_answers(40)
        broker.pause()
        try:
            wait_until_refused(faulty, load)
            time.sleep(12)
        finally:
            broker.resume()
        resumed = time.monotonic()
        check_recovered(faulty, load)
        wait_until(lambda: are_quick(load, since=resumed), HEALED)
    check_refusals(load)
    recorded(broker, faulty).check(load.sent, load.completed)


def are_quick(load: Load, since: float) -> bool:
    """Of the last 200 calls that began since then, all but two took less than a second."""
    later = [sent.took for sent in load.answered if sent.attempts[0].began > since][-200:]
    return len(later) == 200 and sorted(later)[-3] < 1.0


# F10, the network between the gateway and its broker


@contextmanager
def bounded_memory(gateway: RunningGateway) -> Iterator[None]:
    process = psutil.Process(gateway.process.pid)
    before = process.memory_info().rss
    yield
    assert process.memory_info().rss < before + 100 * MEGABYTE


@pytest.mark.slow
def test_f10_a_slow_network_makes_calls_slow_and_loses_none(
    broker: OwnBroker, faulty: RunningGateway
) -> None:
    with Load(faulty.url, agents=12) as load, bounded_memory(faulty):
        load.wait_for_answers(40)
        broker.proxy.delay = 1.0  # there and back: 2 seconds
        load.wait_for_answers(20)
        broker.proxy.heal()
        check_recovered(faulty, load)
    check_refusals(load)
    recorded(broker, faulty).check(load.sent, load.completed)


@pytest.mark.slow
def test_f10_a_network_of_one_kilobyte_a_second_turns_new_calls_away(
    broker: OwnBroker, faulty: RunningGateway
) -> None:
    with Load(faulty.url, agents=30) as load, bounded_memory(faulty):
        load.wait_for_answers(40)
        broker.proxy.rate = 1024
        wait_until_refused(faulty, load)
        broker.proxy.heal()
        check_recovered(faulty, load)
    check_refusals(load)
    recorded(broker, faulty).check(load.sent, load.completed)


@pytest.mark.slow
def test_f10_connections_that_are_reset_and_refused_lose_no_answer(
    broker: OwnBroker, faulty: RunningGateway
) -> None:
    with Load(faulty.url, agents=12) as load, bounded_memory(faulty):
        for _ in range(10):
            load.wait_for_answers(10)
            broker.proxy.reset()
        broker.proxy.refuse = True
        broker.proxy.reset()
        wait_until_refused(faulty, load)
        broker.proxy.heal()
        check_recovered(faulty, load)
    check_refusals(load)
    recorded(broker, faulty).check(load.sent, load.completed)


@pytest.mark.slow
def test_f10_connections_whose_far_end_is_gone_are_given_up(
    broker: OwnBroker, faulty: RunningGateway
) -> None:
    with Load(faulty.url, agents=12) as load, bounded_memory(faulty):
        load.wait_for_answers(40)
        broker.proxy.abandon()
        wait_until_refused(faulty, load)
        check_recovered(faulty, load, limit=GIVEN_UP)
    check_refusals(load)
    recorded(broker, faulty).check(load.sent, load.completed)


@pytest.mark.slow
def test_f10_acknowledgements_that_do_not_come_back_make_no_step_twice(
    broker: OwnBroker, faulty: RunningGateway
) -> None:
    # Long trajectories: most calls write a Step, and wait for no registration.
    with Load(faulty.url, agents=12, turns=12) as load, bounded_memory(faulty):
        load.wait_for_answers(40)
        held = time.monotonic()
        broker.proxy.hold("down")
        wait_until_refused(faulty, load)
        wait_until(lambda: time.monotonic() > held + 33, 34)  # calls give up after 30 seconds
        told = {sent.step_id for sent in load.sent}
        assert recorded(broker, faulty).steps.keys() - told, "nothing was in doubt"
        broker.proxy.heal()
        check_recovered(faulty, load)
    check_refusals(load)
    log = recorded(broker, faulty)
    log.check(load.sent, load.completed)
    for sent in load.sent:
        # Also if it was asked again without a mark: nobody had the answer of the first time.
        assert len(log.by_text[sent.text]) == 1, sent


# F3 and F4, the gateway itself


@pytest.mark.slow
def test_f3_a_gateway_that_is_killed_gives_retries_what_the_log_has(
    broker: OwnBroker, tokenizer: Path
) -> None:
    survivors: dict[str, str] = {}
    connection = broker.connection(f"f3-{uuid.uuid4().hex[:8]}.")
    own_log = broker.past_the_proxy(connection)
    topics.create(own_log)
    with running_echo(delay=0.4) as engine, ExitStack() as lives:
        lives.callback(broker.proxy.heal)
        gateway = lives.enter_context(running_gateway(connection, [engine.url], tokenizer))
        with Load(gateway.url, agents=40, pause=0.02) as load:
            for _ in range(3):
                load.wait_for_answers(80)
                hold_between_step_and_answer(broker, own_log, load)
                gateway.kill()
                survivors |= unheard(Recorded(own_log), load)
                broker.proxy.heal()
                again = running_gateway(connection, [engine.url], tokenizer, port=gateway.port)
                gateway = lives.enter_context(again)
            load.wait_for_answers(80)
        log = Recorded(own_log)
    log.check(load.sent, load.completed)
    for sent in load.sent:
        assert sent.step_id, f"{sent} was never answered"
        assert {a.outcome for a in sent.attempts} <= {200, 503, "Broken", *CUT}, sent
        if sent.text in survivors:
            assert sent.step_id == survivors[sent.text], "a retry did not get the stored answer"
            assert len(log.by_text[sent.text]) == 1
    assert log.copies == 0


def hold_between_step_and_answer(broker: OwnBroker, own_log: Connection, load: Load) -> None:
    """The few requests that are under way may be registrations, and nothing follows them while these
    are not acknowledged: then it is tried again."""
    deadline = time.monotonic() + HEALED
    while True:
        broker.proxy.hold("down")
        until = time.monotonic() + HEALED / 10
        while time.monotonic() < until:
            if unheard(Recorded(own_log), load):
                return
        assert time.monotonic() < deadline, "no Step was without its answer"
        broker.proxy.heal()
        load.wait_for_answers(20)


def unheard(log: Recorded, load: Load) -> dict[str, str]:
    """Calls that the log has and whose agents do not know it, by text. Their retries are marked,
    but for those of streams."""
    waiting = [sent for sent in load.sent if sent.step_id is None and not sent.stream]
    found = {sent.text: log.by_text.get(sent.text, []) for sent in waiting}
    return {text: steps[-1].step_id for text, steps in found.items() if steps}


@pytest.mark.slow
def test_f3_the_openai_client_gets_its_answers_across_a_kill(
    own_log: Connection, tokenizer: Path
) -> None:
    sent = [Sent(f"sdk-{n}", f"[[sdk-{n}]]", stream=False) for n in range(12)]
    with running_echo(delay=4.0) as engine, ExitStack() as lives, ThreadPoolExecutor(12) as agents:
        gateway = lives.enter_context(running_gateway(own_log, [engine.url], tokenizer))
        asked = [agents.submit(ask, gateway, call) for call in sent]
        wait_until(lambda: any(call.done() for call in asked), HEALED)
        gateway.kill()
        again = running_gateway(own_log, [engine.url], tokenizer, port=gateway.port)
        lives.enter_context(again)
        for call in asked:
            call.result(timeout=60)
    log = Recorded(own_log)
    log.check(sent)
    assert all(len(log.by_text[call.text]) == 1 for call in sent)


def ask(gateway: RunningGateway, sent: Sent) -> None:
    client = gateway.openai(sent.uid, "sdk", max_retries=10)
    answer = client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": sent.text}]
    )
    sent.step_id = answer.id.removeprefix("chatcmpl-")
    sent.content = answer.choices[0].message.content


@pytest.mark.slow
def test_f3_completions_that_are_repeated_after_a_kill_are_all_answered(
    own_log: Connection, stub: StubEngine, tokenizer: Path, uid: str
) -> None:
    with running_gateway(own_log, [stub.url], tokenizer) as gateway:
        base = gateway.base(uid, "prompt")
        assert gateway.post(f"{base}/chat/completions", HELLO).status == 200
        assert gateway.post(f"{base}/complete_trajectory", {"reward": 1.0}).status == 200
        gateway.kill()
    with (
        running_gateway(own_log, [stub.url], tokenizer, port=gateway.port) as again,
        ThreadPoolExecutor(8) as agents,
    ):
        complete = partial(again.post, f"{base}/complete_trajectory")
        replies = list(agents.map(complete, [{"reward": 1.0}] * 8))
        assert [reply.status for reply in replies] == [200] * 8
        assert complete({"reward": 0.0}).status == 409
        assert again.post(f"{base}/chat/completions", HELLO).status == 409


@pytest.mark.slow
def test_f4_a_gateway_that_is_asked_to_end_finishes_what_it_began(
    own_log: Connection, tokenizer: Path
) -> None:
    with (
        running_echo(delay=4.0) as engine,
        running_gateway(own_log, [engine.url], tokenizer, "--drain-s", "60") as gateway,
        Load(gateway.url, agents=60, turns=1) as load,
    ):
        load.wait_for_answers(60)
        wait_until(lambda: gateway.metric("gateway_inflight_requests") > 30, HEALED)
        begun = texts(engine)
        engine.process.send_signal(signal.SIGSTOP)  # no call ends meanwhile
        gateway.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not accepts(gateway), HEALED)
        assert gateway.process.poll() is None, "it did not wait for its calls"
        engine.process.send_signal(signal.SIGCONT)
        assert gateway.process.wait(timeout=90) == 143
        load.give_up()
    broken = [sent for sent in load.sent if sent.step_id is None and sent.text in begun]
    assert not broken, broken[:3]
    assert not [o for o in load.outcomes() if isinstance(o, int) and o >= 500]
    Recorded(own_log).check(load.sent, load.completed)


def texts(engine: StubEngine) -> set[str]:
    """Of the calls that it has, or had."""
    prompts = [bytes(n for n in asked["token_ids"] if n < 256) for asked in engine.requests()]
    return {TEXT.findall(prompt)[-1].decode() for prompt in prompts}


def accepts(gateway: RunningGateway) -> bool:
    try:
        socket.create_connection(("127.0.0.1", gateway.port), timeout=HEALED).close()
    except ConnectionRefusedError:
        return False
    return True


# F14, the engines


@pytest.mark.slow
def test_f14_engines_that_die_and_fail_leave_only_whole_steps(
    own_log: Connection, tokenizer: Path
) -> None:
    random = Random(14)
    with ExitStack() as lives:

        def engine(port: int = 0) -> StubEngine:
            return lives.enter_context(running_echo(delay=0.1, faults=0.3, port=port))

        engines = [engine() for _ in range(3)]
        urls = [stub.url for stub in engines]
        gateway = lives.enter_context(running_gateway(own_log, urls, tokenizer))
        with Load(gateway.url, agents=16) as load:
            for _ in range(6):
                load.wait_for_answers(35)
                dying = random.randrange(3)
                engines[dying].kill()
                load.wait_for_answers(5)
                engines[dying] = engine(engines[dying].port)
    assert {a.outcome for a in load.attempts()} <= {200, 502, 503, "Broken"}
    assert all(sent.step_id for sent in load.sent)
    log = Recorded(own_log)
    log.check(load.sent, load.completed)
    assert log.copies == 0


# F16, clients that repeat themselves


def test_f16_a_turn_that_comes_twice_at_once_is_two_steps_unless_it_is_marked_as_a_retry(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    path = gateway.base(uid, prompt_uid) + "/chat/completions"
    stub.script([{"ids": [*b"one", EOS], "delay": 1.0}, {"ids": [*b"two", EOS], "delay": 1.0}])
    with ThreadPoolExecutor() as clients:
        replies = list(clients.map(lambda _: gateway.post(path, HELLO), range(2)))
        assert {reply.body["id"] for reply in replies} == ids_of(gateway.steps(uid))
        assert len(gateway.steps(uid)) == 2
        stub.script([{"ids": [*b"three", EOS], "delay": 1.0}])
        question = HELLO | {"seed": 3}
        first = clients.submit(gateway.post, path, question)
        wait_until(lambda: stub.waiting() == 0, HEALED)
        again = gateway.post(path, question, {"x-stainless-retry-count": "1"})
    assert again.body["id"] == first.result().body["id"]
    assert len(gateway.steps(uid)) == 3


def ids_of(steps: Sequence[Step]) -> set[str]:
    return {f"chatcmpl-{step.step_id}" for step in steps}


def test_f16_turns_that_overtake_each_other_keep_the_order_of_their_arrival(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    path = gateway.base(uid, prompt_uid) + "/chat/completions"
    stub.script([{"ids": [*b"slow", EOS], "hold": 0}, {"ids": [*b"fast", EOS]}])
    with ThreadPoolExecutor() as clients:
        slow = clients.submit(gateway.post, path, HELLO)
        wait_until(lambda: stub.waiting() == 1, HEALED)
        fast = gateway.post(path, HELLO | {"seed": 2})
        stub.release()
    steps = gateway.steps(uid)
    assert [step.step_index for step in steps] == [1, 0]
    replies = [fast, slow.result()]
    assert [f"chatcmpl-{step.step_id}" for step in steps] == [r.body["id"] for r in replies]
    assert gateway.post(gateway.base(uid, prompt_uid) + "/complete_trajectory").status == 200
    whole = Recorded(gateway.connection).closed[uid]
    assert whole.problem is None
    assert [step_of(received).step_index for received in whole.steps] == [0, 1]


def test_f16_of_two_completions_at_once_that_differ_one_is_refused(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    base = gateway.base(uid, prompt_uid)
    stub.script([{"ids": [*b"slow", EOS], "delay": 1.0}])
    with ThreadPoolExecutor() as clients:
        slow = clients.submit(gateway.post, f"{base}/chat/completions", HELLO)
        wait_until(lambda: stub.waiting() == 0, HEALED)
        complete = partial(gateway.post, f"{base}/complete_trajectory")
        replies = list(clients.map(complete, [{"reward": 1.0}, {"reward": 0.0}]))
    assert slow.result().status == 200
    assert sorted(reply.status for reply in replies) == [200, 409]
    (end,) = [f.record for f in gateway.log_of(uid) if isinstance(f.record, TrajectoryEnd)]
    assert end.reward == (1.0 if replies[0].status == 200 else 0.0)
    assert end.steps == 1


def test_f16_a_trajectory_that_nobody_completes_stays_open_and_is_no_problem_to_others(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    path = gateway.base(uid, prompt_uid) + "/chat/completions"
    other = gateway.base(f"{uid}-other", prompt_uid)
    assert gateway.post(path, HELLO).status == 200
    assert gateway.post(f"{other}/chat/completions", HELLO).status == 200
    assert gateway.post(f"{other}/complete_trajectory").status == 200
    assert gateway.post(path, HELLO | {"seed": 1}).status == 200
    closed = Recorded(gateway.connection).closed
    assert uid not in closed and closed[f"{uid}-other"].problem is None
    (registration, *_) = [found.record for found in gateway.log_of(uid, TRAJECTORIES)]
    assert isinstance(registration, Registration) and registration.deadline
