"""The fold: what it tells environments, and that a snapshot loses nothing of it."""

import dataclasses

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.atropos.state.env_status import env_status
from gateway.atropos.state.events import (
    AnyEvent,
    Began,
    Env,
    Handed,
    Joined,
    Left,
    Registered,
    Reset,
    Snapshot,
    Training,
    decode_event,
    encode_event,
)
from gateway.atropos.state.queue import QueuedGroup
from gateway.atropos.state.state import AtroposState, sequences_in
from tests.gateway.atropos import running
from tests.gateway.atropos.groups import group

TRAINING = msgspec.convert(running.TRAINING | {"starting_step": 3}, Training)


def env(**fields: object) -> Env:
    about = {"max_context_len": 512, "weight": 1.0, "desired_name": "e", "group_size": 4}
    return msgspec.convert(about | fields, Env)


class Story:
    """A state, and the sequence number of what happens next."""

    def __init__(self, *happened: AnyEvent | tuple[int, int | None]) -> None:
        self.state = AtroposState()
        self.sequence = 0
        for one in happened:
            self.goes_on(one)

    def goes_on(self, one: AnyEvent | tuple[int, int | None]) -> None:
        self.sequence += 1
        if isinstance(one, tuple):
            self.state.add_group(group(self.sequence, *one))
        else:
            self.state.apply(self.sequence, one)

    def batch(self) -> list[int] | None:
        formed = self.state.next_batch()
        if formed is None:
            return None
        self.goes_on(formed)
        return formed.groups


def begun(*envs: Env) -> Story:
    return Story(Registered(training=TRAINING), Began(), *(Joined(env=e) for e in envs))


def test_batches_come_oldest_first_and_the_step_counts_them() -> None:
    story = begun()
    for _ in range(7):
        story.goes_on((4, None))
    assert [story.batch() for _ in range(4)] == [[3, 4], [5, 6], [7, 8], None]
    assert story.state.step == 3 + 3
    assert len(story.state.queue) == 1


def test_a_registration_counts_although_a_group_came_before_it() -> None:
    story = Story((8, None), Registered(training=TRAINING), Began())
    assert story.batch() == [1]


def test_a_second_registration_changes_nothing() -> None:
    other = msgspec.structs.replace(TRAINING, batch_size=99)
    assert Story(Registered(training=TRAINING), Registered(training=other)).state.batch_size == 8


def test_a_group_of_another_size_waits_for_a_set() -> None:
    story = begun(env(group_size=4))
    assert story.state.add_group(group(10, 3, 0)) == 3
    assert story.state.add_group(group(11, 1, 0)) == 0
    assert [g.sequence for g in story.state.queue] == [10, 11]
    assert story.state.latest == group(11, 1, 0)


def test_names_count_their_namesakes() -> None:
    story = begun(env(), env(desired_name="other"), env())
    assert [e.real_name for e in story.state.envs] == ["e_0", "other_0", "e_1"]


def test_nobody_joins_before_the_trainer_has_begun() -> None:
    assert not Story(Registered(training=TRAINING), Joined(env=env())).state.envs


def test_status_counts_in_groups_of_who_asks() -> None:
    story = begun(env(group_size=4), env(group_size=2, min_batch_allocation=0.25, weight=3.0))
    for one in ((4, 0), (4, 0), (2, 1), (2, 1), (2, 1), (4, None)):
        story.goes_on(one)
    found = env_status(story.state, 0)
    assert found is not None
    # Others have 6 -> 8 less a minimum of 2, and 4 of nobody.
    assert found.answer == {
        "current_step": 3,
        "queue_size": (8 + 6 + 4) // 4,
        "unallocated_fraction": 0.75,
        "self_queue_size": 2,
        "max_group_size": 4,
        "env_weight": 0.25,
    }


def test_weights_that_sum_to_nothing_divide_by_nothing() -> None:
    for weight, expected in ((0.0, 0.01), (-1.0, 0.01)):
        found = env_status(begun(env(weight=weight)).state, 0)
        assert found is not None
        assert found.answer["env_weight"] == expected
    alone = env_status(Story(*_left_alone()).state, 0)
    assert alone is not None
    assert alone.answer["env_weight"] == 1.0


def _left_alone() -> list[AnyEvent]:
    return [Registered(training=TRAINING), Began(), Joined(env=env()), Left(env_id=0)]


def test_a_silent_environment_blocks_nobody() -> None:
    story = begun(env(), env(min_batch_allocation=0.5))
    for _ in range(2):
        story.goes_on((4, 0))
    assert story.batch() is None
    story.state.silent = frozenset({1})
    assert story.batch() == [5, 6]


def test_reset_keeps_the_longest_length_and_the_latest_example() -> None:
    story = begun(env())
    story.goes_on((4, 0))
    story.goes_on(Reset())
    state = story.state
    assert (state.batch_size, state.max_token_len, state.step, state.envs) == (-1, 512, 0, [])
    assert state.latest == group(4, 4, 0)
    assert not state.queue


def test_a_batch_whose_groups_were_reset_is_none() -> None:
    story = begun()
    for _ in range(2):
        story.goes_on((4, None))
    formed = story.state.next_batch()
    assert formed is not None
    story.goes_on(Reset())
    story.goes_on(formed)
    assert not story.state.unhanded
    assert story.state.step == 0


HAPPENS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([None, 0, 1])),
        st.sampled_from(["batch", "hand", "join", "leave", "reset", "register"]),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(HAPPENS, st.integers(0, 40))
def test_a_snapshot_and_what_follows_give_the_same_state(
    happens: list[tuple[int, int | None] | str], at: int
) -> None:
    told = begun(env(), env(group_size=2))
    again = AtroposState()
    groups: dict[int, QueuedGroup] = {}
    for n, one in enumerate(happens):
        if n == at:
            text = encode_event(told.state.snapshot())
            again = _restored(text, groups)
        event = _event(told.state, one) if isinstance(one, str) else one
        if event is None:
            continue
        told.goes_on(event)
        if isinstance(event, tuple):
            groups[told.sequence] = group(told.sequence, *event)
            again.add_group(groups[told.sequence])
        else:
            again.apply(told.sequence, event)
    if at < len(happens):
        rebuilt, kept = again.snapshot(), told.state.snapshot()
        replace = msgspec.structs.replace
        assert replace(rebuilt, floors={}) == replace(kept, floors={})
        # Who begins anew may read a little more.
        assert all(rebuilt.floors[p] <= floor for p, floor in kept.floors.items())
        assert [*again.needed_groups()] == [*told.state.needed_groups()]


def _restored(text: str, groups: dict[int, QueuedGroup]) -> AtroposState:
    snapshot = decode_event(text)
    assert isinstance(snapshot, Snapshot)
    state = AtroposState()
    state.restore(snapshot, {s: groups[s] for s in sequences_in(snapshot)})
    return state


def _event(state: AtroposState, word: str) -> AnyEvent | None:
    match word:
        case "batch":
            return state.next_batch()
        case "hand":
            return Handed(number=next(iter(state.unhanded))) if state.unhanded else None
        case "join":
            return Joined(env=env(group_size=8))
        case "leave":
            return Left(env_id=0)
        case "reset":
            return Reset()
        case _:
            return Registered(training=TRAINING)


def of_agents(sequence: int, size: int, prompt: str = "p", closed_at: int = 7) -> QueuedGroup:
    plain = group(sequence, size)
    record = msgspec.structs.replace(
        plain.record, channel="atropos", prompt_uid=prompt, group_uid=f"{prompt}/{closed_at}"
    )
    return dataclasses.replace(plain, record=record)


def test_a_large_group_of_agents_does_not_stop_the_others() -> None:
    story = Story(Registered(training=TRAINING), (9, None), (4, None), (4, None))
    assert story.batch() is None, "as Atropos has it"
    story.state.add_group(of_agents(5, 2))
    assert story.batch() == [3, 4]


def test_a_snapshot_knows_which_groups_of_agents_came() -> None:
    state = AtroposState()
    for sequence, prompt in enumerate(("a", "b", "c")):
        state.add_group(of_agents(3 * sequence, 4, prompt, closed_at=10 * sequence))
    state.apply(9, Reset())
    state.set_reading_progress(0, 102, memory=101)
    after = AtroposState()
    after.restore(state.snapshot(), {})
    assert {uid: closed.closed_at for uid, closed in after.closed.items()} == {"b": 10, "c": 20}
    assert after.reading == {0: 102}
