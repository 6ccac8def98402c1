"""Logs for property tests, as hypothesis draws them."""

from itertools import accumulate
from random import Random
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st
from msgspec.structs import replace

from pool.core.progress import Received
from pool.core.prompts import encode_prompt
from schemas import Record
from schemas.packing import pack_ids
from tests.pool.records import copied, end, feedback, note, step

T = TypeVar("T")


class Draw(Protocol):
    def __call__(self, strategy: st.SearchStrategy[T]) -> T: ...


UIDS = st.sampled_from(["t1", "t2", "t3"])
PROMPTS = st.sampled_from(["p", "p", "p", "q"])
STEP_IDS = st.sampled_from(["s1", "s2", "s3", "s4"])
REWARDS = st.sampled_from([0.0, 0.5, 1.0])


def _step(step_id: str, uid: str, prompt: str, index: int, **fields: Any) -> Record:
    return step(step_id, uid, prompt, index=index, ids=(), response=(), **fields)


STEPS: st.SearchStrategy[Record] = st.builds(
    _step,
    STEP_IDS,
    UIDS,
    PROMPTS,
    index=st.integers(0, 2),
    parent=st.sampled_from([None, None, "s1"]),
    request_hash=st.sampled_from([b"", b"request"]),
)
ENDS: st.SearchStrategy[Record] = st.builds(
    end,
    UIDS,
    PROMPTS,
    steps=st.integers(0, 2),
    status=st.sampled_from(["completed", "failed", "expired"]),
    reward=st.none() | REWARDS,
    reward_expected=st.sampled_from([False, False, False, True]),
    group_size=st.sampled_from([None, 1, 1, 3]),
    channel=st.sampled_from([*["train"] * 7, "val"]),
)
ANY_RECORDS: st.SearchStrategy[Record] = st.one_of(
    STEPS,
    STEPS,
    ENDS,
    ENDS,
    st.builds(
        feedback,
        REWARDS,
        UIDS,
        PROMPTS,
        id=st.sampled_from(["f1", "f2", "f3"]),
        step_id=st.sampled_from([None, None, "s1"]),
    ),
    st.builds(note, STEP_IDS, st.booleans(), UIDS, id=st.sampled_from(["n1", "n2"])),
)
"""Records that fit together by accident only: uids, ids and prompts come back again and again."""


def lists_up_to(size: int, elements: st.SearchStrategy[T]) -> st.SearchStrategy[list[T]]:
    """Lists of every length alike: left alone, hypothesis draws few elements."""
    return st.integers(0, size).flatmap(lambda n: st.lists(elements, min_size=n, max_size=n))


@st.composite
def any_logs(draw: st.DrawFn) -> list[Received]:
    """As `steps` would be: any records at rising offsets, with gaps where markers lie."""
    return placed(draw, draw(lists_up_to(40, ANY_RECORDS)))


@st.composite
def any_rewarded_logs(draw: st.DrawFn) -> list[Received]:
    """As `rewarded` would be: copies of records that lie in `steps` in any other order."""
    received = draw(any_logs())
    sources = draw(st.permutations(range(len(received))))
    return [copied(r.offset, r.record, s) for r, s in zip(received, sources, strict=True)]


def random_log(random: Random) -> list[Received]:
    """Like the two above, from a seed: it does not shrink, and takes a fraction of their time."""
    prompts = ["p", "q"][: random.choice([1, 1, 2])]
    uids = ["t1", "t2", "t3", "t4"][: random.randint(2, 4)]
    size = random.randint(5, 60)
    records = [_random_record(random, random.choice(uids), prompts) for _ in range(size)]
    offsets = list(accumulate(random.choice([1, 1, 1, 2, 3]) for _ in range(size)))
    if random.random() < 0.6:
        return [
            Received(record, 0, offset) for record, offset in zip(records, offsets, strict=True)
        ]
    disorder = random.choice([3, 10, size])
    sources = sorted(range(size), key=lambda n: n + random.random() * disorder)
    return [copied(*one) for one in zip(offsets, records, sources, strict=True)]


def _random_record(random: Random, uid: str, prompts: list[str]) -> Record:
    home = prompts[int(uid[1:]) % len(prompts)]
    prompt = home if random.random() < 0.9 else random.choice(prompts)
    kind = random.choices(["step", "end", "feedback", "note"], [8, 8, 3, 1])
    if kind == ["step"]:
        parent = random.choice([None, None, None, "s1"])
        step_id, index = random.choice(["s1", "s2", "s3"]), random.randrange(3)
        return _step(step_id, uid, prompt, index, parent=parent)
    if kind == ["end"]:
        return end(
            uid,
            prompt,
            steps=random.choice([0, 1, 1, 2]),
            status=random.choice(["completed", "completed", "failed"]),
            reward=random.choice([None, 0.0, 1.0]),
            reward_expected=random.random() < 0.2,
            group_size=random.choice([None, None, 1, 3]),
            channel=random.choice([*["train"] * 9, "val"]),
        )
    if kind == ["feedback"]:
        reward = random.choice([0.0, 0.5, 1.0])
        return feedback(reward, uid, prompt, id=random.choice(["f1", "f2", "f3", "f4"]))
    return note("s1", random.random() < 0.5, uid, id=random.choice(["n1", "n2"]))


def placed(draw: Draw, records: list[Record]) -> list[Received]:
    gaps = draw(st.lists(st.integers(1, 3), min_size=len(records), max_size=len(records)))
    offsets = [sum(gaps[:n]) for n in range(len(records))]
    return [Received(record, 0, offset) for record, offset in zip(records, offsets, strict=True)]


Histories = list[list[Record]]
"""The records of each prompt, in order."""


@st.composite
def histories(draw: st.DrawFn) -> Histories:
    """Prompts with trajectories as agents make them, well or badly."""
    prompts = ["p", "q", "r"][: draw(st.integers(1, 3))]
    return [merged(draw, _trajectories(draw, prompt)) for prompt in prompts]


def _trajectories(draw: st.DrawFn, prompt: str) -> Histories:
    uids = [f"{prompt}{n}" for n in range(draw(st.integers(1, 5)))]
    return [_trajectory(draw, uid, prompt) for uid in uids]


def _trajectory(draw: st.DrawFn, uid: str, prompt: str) -> list[Record]:
    """Turns whose prompts are deltas, some with retries, then an End and what comes late."""
    records: list[Record] = []
    contexts: dict[str, bytes] = {}
    context, steps = [*range(20)], 0
    for turn in range(draw(st.integers(0, 3))):
        answers = draw(st.integers(1, 2))
        asked = [*context, 1000 + turn]
        for answer in range(answers):
            step_id, response = f"{uid}-{turn}-{answer}", [2000 + turn, 3000 + answer]
            stored = encode_prompt(pack_ids(asked), contexts)
            fields = {"request_hash": f"{uid}-{turn}".encode(), **stored._asdict()}
            one = step(step_id, uid, prompt, index=turn, response=response)
            records.append(replace(one, **fields))
            contexts[step_id] = pack_ids([*asked, *response])
            if draw(st.booleans()):
                records.append(_note(draw, step_id, uid, prompt))
        context = [*asked, 2000 + turn, 3000 + draw(st.integers(0, answers - 1))]
        steps += answers
    records += draw(_rewards(uid, prompt, "early")) if records else []
    if draw(st.integers(0, 9)):
        records.append(_end(draw, uid, prompt, steps))
        records += draw(_rewards(uid, prompt, "late"))
        late = [step(f"{uid}-late", uid, prompt), end(uid, prompt, end_id=f"{uid}-late")]
        records += draw(st.sampled_from([[], late[:1], late[1:], late]))
    return records


def _note(draw: st.DrawFn, step_id: str, uid: str, prompt: str) -> Record:
    delivered = draw(st.booleans())
    return replace(note(step_id, delivered, uid), prompt_uid=prompt)


def _rewards(uid: str, prompt: str, when: str) -> st.SearchStrategy[list[Record]]:
    values = st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=2)
    return values.map(
        lambda given: [
            feedback(value, uid, prompt, id=f"{uid}-{when}-{n}") for n, value in enumerate(given)
        ]
    )


def _end(draw: st.DrawFn, uid: str, prompt: str, steps: int) -> Record:
    return end(
        uid,
        prompt,
        steps=steps + draw(st.sampled_from([0, 0, 0, 1])),  # one more than there are: a hole
        status=draw(st.sampled_from(["completed", "completed", "truncated", "failed", "expired"])),
        reward=draw(st.sampled_from([None, 0.0, 1.0])),
        reward_expected=draw(st.booleans()),
        group_size=draw(st.sampled_from([None, 1, 2, 3])),
        channel=draw(st.sampled_from(["train", "train", "train", "val"])),
    )


def merged(draw: Draw, sequences: Histories) -> list[Record]:
    """One log of them all; each keeps its own order."""
    turns = [n for n, records in enumerate(sequences) for _ in records]
    rest = [iter(records) for records in sequences]
    return [next(rest[n]) for n in draw(st.permutations(turns))]


def copies_of(draw: Draw, records: list[Record]) -> list[Record]:
    """The same log with copies of some records, anywhere after the originals."""
    log = list(records)
    for original in records:
        if draw(st.integers(0, 3)) == 0:
            first = next(n for n, record in enumerate(log) if record is original)
            log.insert(draw(st.integers(first + 1, len(log))), original)
    return log
