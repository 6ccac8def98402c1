import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.core.prompts import (
    BrokenPrompt,
    common_prefix,
    encode_prompt,
    full_prompt,
    full_prompts,
    prefix_hash,
)
from schemas import Codec, Step
from schemas.packing import pack_ids, pack_logprobs
from tests.pool.records import child, step

IDS = st.lists(st.integers(0, 3), max_size=60)
"""Few different ids, so that prefixes are shared by accident too."""
LONG = list(range(20))


def stored(step_id: str, prompt: bytes, response: bytes, contexts: dict[str, bytes]) -> Step:
    return Step(
        step_id=step_id,
        trajectory_uid="t",
        prompt_uid="p",
        step_index=0,
        run="run",
        **encode_prompt(prompt, contexts)._asdict(),
        response_ids=response,
        response_logprobs=bytes(len(response)),
    )


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 10), IDS, IDS), max_size=8))
def test_every_prompt_comes_back_whole(turns: list[tuple[bool, int, list[int], list[int]]]) -> None:
    contexts: dict[str, bytes] = {}
    steps: list[Step] = []
    prompts: dict[str, bytes] = {}
    for n, (extends, which, ids, response) in enumerate(turns):
        known = list(contexts.values())
        begin = known[which % len(known)] if extends and known else b""
        prompts[f"s{n}"] = prompt = begin + pack_ids(ids)
        steps.append(stored(f"s{n}", prompt, pack_ids(response), contexts))
        contexts[f"s{n}"] = prompt + pack_ids(response)
    assert full_prompts(steps) == prompts


@given(IDS, IDS)
def test_the_common_prefix_is_counted_in_whole_ids(left: list[int], right: list[int]) -> None:
    same = 0
    while same < min(len(left), len(right)) and left[same] == right[same]:
        same += 1
    assert common_prefix(pack_ids(left), pack_ids(right)) == 4 * same


def test_ids_that_differ_in_one_byte_only_are_different() -> None:
    assert common_prefix(pack_ids([1, 0x0100]), pack_ids([1, 0x0200])) == 4


def test_a_delta_names_the_parent_the_length_and_a_hash_of_what_they_share() -> None:
    context = pack_ids(LONG)
    found = encode_prompt(context + pack_ids([7]), {"parent": context})
    assert found == (pack_ids([7]), "parent", 20, prefix_hash(context))


def test_the_hash_of_a_prefix_has_64_bits() -> None:
    hashes = [prefix_hash(pack_ids([n])) for n in range(100)]
    assert len(set(hashes)) == 100
    assert -(2**63) <= min(hashes) < -(2**55) < 2**55 < max(hashes) < 2**63


def test_a_prefix_too_short_to_be_worth_sharing_is_stored_again() -> None:
    assert encode_prompt(pack_ids(LONG), {"s": pack_ids(range(15))}).parent is None
    assert encode_prompt(pack_ids(LONG), {"s": pack_ids(range(16))}).parent == "s"


def test_the_parent_is_the_step_that_shares_most_and_the_newest_of_equals() -> None:
    contexts = {
        "short": pack_ids(range(17)),
        "long": pack_ids(range(19)),
        "equal": pack_ids([*range(19), 99]),
        "shorter": pack_ids(range(18)),
    }
    assert encode_prompt(pack_ids(LONG), contexts).parent == "equal"


def test_a_prompt_may_branch_off_inside_of_its_parent() -> None:
    parent = stored("parent", pack_ids(LONG), b"", {})
    branch = stored("branch", pack_ids([*range(18), 7]), b"", {"parent": pack_ids(LONG)})
    assert (branch.parent, branch.prefix_length) == ("parent", 18)
    assert full_prompts([parent, branch])["branch"] == pack_ids([*range(18), 7])


def test_a_missing_parent_is_a_broken_prompt() -> None:
    parent = step("parent", ids=LONG, response=[])
    with pytest.raises(BrokenPrompt, match="extends parent, which is not in the log"):
        full_prompts([child("s", parent, LONG, [7])])


def test_a_parent_that_comes_after_its_child_is_missing() -> None:
    parent = step("parent", ids=LONG, response=[])
    with pytest.raises(BrokenPrompt):
        full_prompts([child("s", parent, LONG, [7]), parent])


@pytest.mark.parametrize("ids", [[*LONG[:-1], 99], LONG[:-1], []])
def test_a_changed_parent_is_a_broken_prompt(ids: list[int]) -> None:
    parent = step("parent", ids=LONG, response=[])
    with pytest.raises(BrokenPrompt, match="extends other ids than those of parent"):
        full_prompt(child("s", parent, LONG, [7]), {"parent": pack_ids(ids)})


def test_fifty_turns_take_at_most_a_fifth_more_than_their_new_tokens_and_logprobs() -> None:
    codec, contexts = Codec(), dict[str, bytes]()
    context, written = b"", 0
    for turn in range(50):
        step_id = f"0198c5a2-7d1e-7000-8000-{turn:012}"
        prompt = context + pack_ids(range(turn * 2_000, turn * 2_000 + 1_400))
        response = pack_ids(range(turn * 2_000 + 1_400, turn * 2_000 + 2_000))
        one = Step(
            step_id=step_id,
            trajectory_uid="0198c5a2-7d1e-7000-8000-aaaaaaaaaaaa",
            prompt_uid="0198c5a2-7d1e-7000-8000-bbbbbbbbbbbb",
            step_index=turn,
            run="run-2026-01-01",
            **encode_prompt(prompt, contexts)._asdict(),
            response_ids=response,
            response_logprobs=pack_logprobs([-0.125] * 600),
            model="a/model-of-some-size",
            request_hash=bytes(32),
            metadata='{"task": "some question", "answer": "some answer"}',
        )
        written += len(codec.encode(one))
        contexts[step_id] = context = prompt + response
    new_tokens = 50 * 2_000 * 4
    logprobs = 50 * 600 * 4
    assert written <= 1.2 * (new_tokens + logprobs)
