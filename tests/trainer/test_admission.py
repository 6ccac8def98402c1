"""A gateway and a trainer that know each other only through the log: how many groups are in flight."""

from pathlib import Path

import pytest

from pool import topics
from pool.connection import Connection
from tests.gateway.client import error, eventually
from tests.gateway.running import Reply, RunningGateway, running_gateway
from tests.gateway.stub_engine import running_stub
from tests.trainer.agents import RUN, submit_groups
from tests.trainer.trainer_process import TrainerProcess, settings_of

pytestmark = [pytest.mark.broker, pytest.mark.slow]

SIZE = 2
LIMIT = 3
"""Batches of the trainer that may be in flight by default; a batch is one group here."""


def begin_group(gateway: RunningGateway, name: str) -> Reply:
    """Registers all trajectories of a group, with the ids that `submit_groups` gives them."""
    replies = [
        gateway.post(f"/{name}-{place}/{name}/v1/register_trajectory", {"group_size": SIZE})
        for place in range(SIZE)
    ]
    return replies[0]


def test_three_batches_are_in_flight_and_each_decision_makes_room_for_one_more(
    connection: Connection, tiny_model: Path, tmp_path: Path
) -> None:
    """It starts both services, because the bound comes from what one of them writes."""
    topics.create(connection, partitions=2)
    settings = settings_of(connection, tiny_model, tmp_path, groups_per_batch=1, versions=1)
    with (
        running_stub(tokens=8) as engine,
        running_gateway(connection, [engine.url], tiny_model, "--run", RUN, wait=False) as gateway,
    ):
        eventually(lambda: "Ready to serve calls" in gateway.log.read_text())
        trainer = TrainerProcess(settings)
        try:
            eventually(lambda: gateway.get("/policy").body["incarnation"])
            statuses = [begin_group(gateway, f"p{number}").status for number in range(LIMIT)]
            assert statuses == [200] * LIMIT
            assert f"(limit {LIMIT})" in error(begin_group(gateway, "next"))["message"]
            submit_groups(connection, ["p0"], size=SIZE)
            eventually(lambda: begin_group(gateway, "next").status == 200)
            assert begin_group(gateway, "another").status == 429
            assert trainer.wait() == 0
        finally:
            trainer.end()
