"""Who may post, how much may wait, and who an environment is that comes again."""

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from pool.connection import Connection
from pool.topics import REWARDED
from schemas import ScoredGroup
from tests.gateway.atropos.running import ENV, JSON, RunningAtropos, running_atropos, scored
from tests.gateway.client import eventually
from tests.pool.log import records

pytestmark = pytest.mark.broker

RUN = "limited"
KEY = "a-key-of-environments"
MOST = 3


@pytest.fixture(scope="module")
def server(
    atropos_log: Connection, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningAtropos]:
    """It listens everywhere, and is not told --insecure."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"envs:{KEY}\n")
    options = ["--host", "0.0.0.0", "--keys-file", str(keys), "--run", RUN]
    # Long enough for some questions, however slow: who asks none is silent.
    options += ["--max-queue", str(MOST), "--silent-after-s", "10"]
    with running_atropos(atropos_log, *options) as running:
        running.always = {"authorization": f"Bearer {KEY}"}
        yield running


@pytest.fixture
def limited(server: RunningAtropos) -> RunningAtropos:
    server.get("/reset_data")
    return server


def written(connection: Connection) -> int:
    found = records(connection, REWARDED)
    return sum(isinstance(record, ScoredGroup) and record.run == RUN for record in found)


@pytest.mark.parametrize("given", ["", "Bearer x", "Basic eDp5", "Basic é"])
@pytest.mark.parametrize("route", [("GET", "/batch"), ("POST", "/scored_data"), ("GET", "/info")])
def test_without_a_key_all_is_refused(
    limited: RunningAtropos, given: str, route: tuple[str, str]
) -> None:
    reply = limited.ask(*route, scored(1.0), JSON | {"authorization": given})
    assert reply.status == 401
    assert "API key" in reply.body["detail"]
    assert limited.get("/status")["queue_size"] == 0


def test_whether_it_lives_is_no_secret(limited: RunningAtropos) -> None:
    assert limited.ask("GET", "/health", headers={"authorization": ""}).status == 200


def test_clients_that_take_a_url_only_have_the_key_in_it(limited: RunningAtropos) -> None:
    """As stock environments ask."""

    async def ask() -> Any:
        url = f"http://any:{KEY}@127.0.0.1:{limited.port}/status"
        async with aiohttp.ClientSession() as session, session.get(url) as reply:
            return await reply.json()

    assert asyncio.run(ask()) == {"current_step": 0, "queue_size": 0}


def test_a_full_queue_refuses_posts_until_a_batch_is_taken(
    limited: RunningAtropos, atropos_log: Connection
) -> None:
    limited.begin(batch_size=4)
    for score in range(MOST):
        assert limited.post("/scored_data", scored(score)) == {"status": "received"}
    before = written(atropos_log)
    for path, body in (
        ("/scored_data", scored(7.0)),
        ("/scored_data_list", [scored(8.0), scored(9.0)]),
    ):
        refused = limited.ask("POST", path, body)
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) > 0
        assert "--max-queue is 3" in refused.body["detail"]
    assert written(atropos_log) == before
    assert limited.batch_scores() == [[0.0] * 4]
    eventually(lambda: limited.ask("POST", "/scored_data", scored(7.0)).status == 200)
    scores = [limited.batch_scores() for _ in range(MOST)]
    assert scores == [[[1.0] * 4], [[2.0] * 4], [[7.0] * 4]]


def test_a_group_that_names_no_environment_is_taken(limited: RunningAtropos) -> None:
    limited.begin(batch_size=4)
    nameless = {name: value for name, value in scored(1.0).items() if name != "env_id"}
    assert limited.post("/scored_data", nameless) == {"status": "received"}


def test_groups_that_never_sum_up_fill_their_own_buffer_only(limited: RunningAtropos) -> None:
    limited.begin(batch_size=4)
    odd, even = limited.join(group_size=4), limited.join(group_size=4)
    for score in range(MOST):
        told = limited.post("/scored_data", scored(score, size=3, env_id=odd))
        assert told["status"] == "buffered"
    assert limited.ask("POST", "/scored_data", scored(9.0, size=3, env_id=odd)).status == 503
    assert limited.ask("POST", "/scored_data", scored(9.0, env_id=even)).status == 200


def test_an_environment_that_is_started_again_is_the_same_one(limited: RunningAtropos) -> None:
    limited.begin()
    first, second = limited.join(), limited.join()
    assert (first, second) == (0, 1)

    def poll(env_id: int) -> float:
        weight: float = limited.get("/status-env", {"env_id": env_id})["env_weight"]
        return weight

    eventually(lambda: poll(second) == 1.0)  # the first one is silent
    again = limited.post("/register-env", ENV | {"weight": 3.0})
    assert (again["env_id"], again["wandb_name"]) == (first, "maths_0")
    assert poll(second) == 0.25
    assert limited.join() == 2
    assert limited.post("/disconnect-env", {"env_id": second}) == {"status": "success"}
    assert limited.join(desired_name="logic") == 3
    limited.kill_server()
    again = limited.post("/register-env", ENV)
    assert (again["env_id"], again["wandb_name"]) == (second, "maths_1")
