"""Logs for property tests, as hypothesis draws them."""

from typing import Any

from hypothesis import strategies as st

from pool.progress import Received
from schemas import Record
from tests.pool.records import copied, end, feedback, note, step

UIDS = st.sampled_from(["t1", "t2", "t3"])
PROMPTS = st.sampled_from(["p", "p", "p", "q"])
STEP_IDS = st.sampled_from(["s1", "s2", "s3", "s4"])
REWARDS = st.sampled_from([0.0, 0.5, 1.0])


def _step(step_id: str, uid: str, prompt: str, index: int, **fields: Any) -> Record:
    return step(step_id, uid, prompt, index=index, ids=(), response=(), **fields)


ANY_RECORDS: st.SearchStrategy[Record] = st.one_of(
    st.builds(
        _step,
        STEP_IDS,
        UIDS,
        PROMPTS,
        index=st.integers(0, 2),
        parent=st.none() | STEP_IDS,
        request_hash=st.sampled_from([b"", b"request"]),
    ),
    st.builds(
        end,
        UIDS,
        PROMPTS,
        steps=st.integers(0, 2),
        status=st.sampled_from(["completed", "failed", "expired"]),
        reward=st.none() | REWARDS,
        reward_expected=st.booleans(),
        group_size=st.sampled_from([None, 1, 2]),
        channel=st.sampled_from(["train", "train", "val"]),
    ),
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


@st.composite
def any_logs(draw: st.DrawFn, max_size: int = 30) -> list[Received]:
    """As `steps` would be: any records at rising offsets, with gaps where markers lie."""
    records = draw(st.lists(ANY_RECORDS, max_size=max_size))
    return placed(draw, records)


@st.composite
def any_rewarded_logs(draw: st.DrawFn, max_size: int = 30) -> list[Received]:
    """As `rewarded` would be: copies of records that lie in `steps` in any other order."""
    received = draw(any_logs(max_size))
    sources = draw(st.permutations(range(len(received))))
    return [copied(r.offset, r.record, s) for r, s in zip(received, sources, strict=True)]


def placed(draw: st.DrawFn, records: list[Record]) -> list[Received]:
    gaps = draw(st.lists(st.integers(1, 3), min_size=len(records), max_size=len(records)))
    offsets = [sum(gaps[:n]) for n in range(len(records))]
    return [Received(record, 0, offset) for record, offset in zip(records, offsets, strict=True)]
