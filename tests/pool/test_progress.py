from hypothesis import given, settings
from hypothesis import strategies as st

from pool.groups import GroupRules
from pool.progress import Received
from tests.pool.crashes import (
    EVERYTHING,
    TAPES,
    Disk,
    RewardLife,
    Tape,
    TrainerDisk,
    TrainerLife,
    Uninterrupted,
    each_once,
    uninterrupted_trajectories,
)
from tests.pool.histories import any_logs, any_rewarded_logs

RULES = GroupRules(group_size=2, quorum=0.5)


@settings(max_examples=1000, deadline=None)
@given(any_logs(), TAPES, st.integers(0, 6))
def test_every_trajectory_is_committed_once_whatever_the_moment_of_the_crash(log, tape, memory):
    disk = Disk(log)
    life = RewardLife(disk, memory)
    for action, amount in tape + EVERYTHING * 6:
        if action == "crash":
            life = RewardLife(disk, memory)
        else:
            life.act(action, amount)
    assert each_once(disk.outputs) == uninterrupted_trajectories(log, memory)


@settings(max_examples=3000, deadline=None)
@given(any_logs() | any_rewarded_logs(), TAPES, st.integers(0, 6))
def test_every_group(log, tape, memory):
    disk = TrainerDisk(log)
    life = TrainerLife(disk, RULES, memory)
    for action, amount in tape + EVERYTHING * 6:
        if action == "crash":
            life = TrainerLife(disk, RULES, memory)
        else:
            life.act(action, amount)
    truth = Uninterrupted(disk, RULES, memory)
    assert each_once(disk.outputs) == truth.outputs
    assert disk.decided == truth.decided
    assert [g.members for g in life.assembler.open_groups()] == [
        g.members for g in truth.assembler.open_groups()
    ]
