"""The Atropos API in the gateway's own server: one address for agents, environments and trainers."""

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from pool import topics
from pool.connection import Connection
from servicekit.command_line import TERMINATED
from steplog.kafka import local_kafka
from tests.conftest import kill_and_wait
from tests.gateway.atropos.running import Client, counting, running_atropos, scored
from tests.gateway.client import chat, eventually, steps
from tests.gateway.running import RunningGateway, running_gateway
from tests.gateway.stub_engine import StubEngine
from tests.steplog.command import reaching, steplog

pytestmark = pytest.mark.broker

RUN = "mounted"


class Both(NamedTuple):
    gateway: RunningGateway
    atropos: Client

    def server(self) -> int:
        (child,) = psutil.Process(self.gateway.process.pid).children()
        return int(child.pid)


@pytest.fixture(scope="module")
def own_log(kafka: local_kafka.Broker) -> Connection:
    own = Connection(bootstrap=kafka.bootstrap, topic_prefix=f"mounted-{uuid.uuid4().hex[:8]}.")
    topics.create(own, partitions=3)
    return own


@pytest.fixture(scope="module")
def both(own_log: Connection, stub: StubEngine, tokenizer: Path) -> Iterator[Both]:
    options = ["--atropos", "--run", RUN, "--drain-s", "1"]
    with running_gateway(own_log, [stub.url], tokenizer, *options) as gateway:
        yield Both(gateway, Client(gateway.port, "/atropos"))


def test_a_trainer_an_environment_and_an_agent_meet_at_one_address(both: Both, uid: str) -> None:
    atropos = both.atropos
    atropos.begin()
    env_id = atropos.join()
    for score in (1.0, 2.0):
        assert atropos.post("/scored_data", scored(score, env_id=env_id)) == {"status": "received"}
    assert chat(both.gateway, uid, "p").status == 200
    assert atropos.batch_scores() == [[1.0] * 4, [2.0] * 4]
    assert len(steps(both.gateway, uid)) == 1
    assert atropos.ask("GET", "/ready").status == 200
    assert atropos.ask("GET", "").body == {"message": "AtroposLib API"}
    assert atropos.ask("GET", "/none").body == {"detail": "Not Found"}
    assert both.gateway.metric("atropos_groups_total") == 2


def test_a_trajectory_may_be_called_as_the_prefix(both: Both) -> None:
    assert chat(both.gateway, "atropos", "p").status == 200
    assert both.gateway.post("/atropos/p/v1/complete_trajectory", {"reward": 1.0}).status == 200


def test_a_killed_server_loses_nothing_and_nobody_is_refused(both: Both, uid: str) -> None:
    atropos = both.atropos
    atropos.get("/reset_data")
    atropos.begin()
    env_id = atropos.join()
    atropos.post("/scored_data", scored(1.0, env_id=env_id))
    kill_and_wait(both.server())
    atropos.post("/scored_data", scored(2.0, env_id=env_id))
    assert atropos.batch_scores() == [[1.0] * 4, [2.0] * 4]
    assert atropos.get("/status-env", {"env_id": env_id})["current_step"] == 1


@pytest.mark.heavy
@pytest.mark.slow
def test_a_stock_environment_serves_there_to_its_end(
    both: Both, tokenizer: Path, tmp_path: Path
) -> None:
    pytest.importorskip("atroposlib")
    both.atropos.get("/reset_data")
    log, groups = tmp_path / "env.log", 0
    with counting(both.atropos, tokenizer, 4, log) as env:
        both.atropos.begin(max_token_len=64, num_steps=4)
        while env.poll() is None:
            groups += len(both.atropos.batch_scores() or ())
            time.sleep(0.1)
        assert env.returncode == 0, log.read_text()[-3000:]
    assert groups >= 4 * 2


def test_another_server_takes_the_run_over_and_calls_go_on(
    both: Both, own_log: Connection, uid: str
) -> None:
    both.atropos.get("/reset_data")
    both.atropos.begin()
    both.atropos.post("/scored_data", scored(7.0, size=8))
    with running_atropos(own_log, "--run", RUN) as other:
        assert other.batch_scores() == [[7.0] * 8]
        eventually(lambda: both.atropos.ask("GET", "/ready").status == 503)
        refused = both.atropos.ask("GET", "/status")
        assert refused.status == 503
        assert f"taken over run {RUN}" in refused.body["detail"]
        eventually(lambda: chat(both.gateway, uid, "p").status == 200)


def test_it_ends_as_a_whole(both: Both) -> None:
    server = psutil.Process(both.server())
    assert both.gateway.terminate() == TERMINATED
    assert not server.is_running()


def test_processes_that_share_a_port_cannot_have_it(connection: Connection) -> None:
    options = ["--engines", "http://127.0.0.1:1", "--tokenizer", "none"]
    told = steplog("gateway", *reaching(connection), *options, "--atropos", "--reuse-port")
    assert told.returncode == 2
    assert "start `steplog atropos` beside the gateways" in told.stderr
