"""What clients of the Atropos API depend on, route by route."""

import gzip
import json
import zlib
from typing import Any

import pytest

from tests.gateway.atropos.running import ENV, JSON, TRAINING, RunningAtropos, scored

pytestmark = pytest.mark.broker

KEYS = [
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "messages",
    "generation_params",
    "inference_logprobs",
    "overrides",
    "group_overrides",
    "images",
    "env_id",
    "distill_token_ids",
    "distill_logprobs",
]
FULL: dict[str, Any] = {
    "tokens": [[1, 2, 3], [4]],
    "masks": [[-100, 2, 3], [4]],
    "scores": [0.1, -1e-17],
    "advantages": [[0.5, 0.25, 1.0, 2.0], []],
    "ref_logprobs": [],
    "messages": [[{"role": "tool", "content": [{"type": "text"}], "reward": None, "x": "é\n"}], []],
    "generation_params": {"temperature": 0.7},
    "inference_logprobs": [[1.0, -0.1234567890123, -3.5], [-0.0]],
    "overrides": [{"set_advantage_to_zero": True}, {}],
    "group_overrides": {},
    "images": ["data:image/png;base64,AA=="],
    "env_id": None,
    "distill_token_ids": [[[1, 2], [3]]],
    "distill_logprobs": [[[-0.5, -1.5], []]],
}


def test_before_a_trainer_registers(atropos: RunningAtropos) -> None:
    assert atropos.get("/") == {"message": "AtroposLib API"}
    assert atropos.get("/wandb_info") == {"group": None, "project": None}
    assert atropos.get("/info")["batch_size"] == -1
    assert atropos.get("/status") == {"current_step": 0, "queue_size": 0}
    assert atropos.get("/batch") == {
        "status": "error",
        "message": "Trainer not registered. Call /register first.",
        "batch": [],
    }
    assert atropos.post("/register-env", ENV) == {"status": "wait for trainer to start"}


def test_a_trainer_and_an_environment_meet(atropos: RunningAtropos) -> None:
    uuid = atropos.post("/register", TRAINING)["uuid"]
    assert isinstance(uuid, int)
    assert atropos.post("/register", TRAINING | {"batch_size": 99})["uuid"] != uuid
    assert atropos.get("/info") == {"batch_size": 8, "max_token_len": 512}
    assert atropos.get("/wandb_info") == {"group": "group", "project": "project"}
    assert atropos.post("/register-env", ENV) == {"status": "wait for trainer to start"}
    assert atropos.get("/batch") == {"batch": None}
    assert atropos.post("/register-env", ENV) == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "maths_0",
        "checkpoint_dir": "/checkpoints",
        "starting_step": 0,
        "checkpoint_interval": 5,
        "num_steps": 100,
    }
    assert atropos.post("/register-env", ENV | {"desired_name": None})["wandb_name"] == "env_0"
    assert atropos.post("/disconnect-env", {"env_id": 1}) == {"status": "success"}
    assert atropos.post("/disconnect-env", {"env_id": 7})["status"] == "failure"


def test_all_fourteen_fields_come_back_as_they_were(atropos: RunningAtropos) -> None:
    atropos.begin(batch_size=4)
    absent = {name: FULL[name] for name in ("tokens", "masks", "scores")}
    assert atropos.post("/scored_data", FULL) == {"status": "received"}
    assert atropos.post("/scored_data", absent | {"unknown": 1}) == {"status": "received"}
    first, second = atropos.get("/batch")["batch"]
    assert list(first) == list(second) == KEYS
    assert json.dumps(first) == json.dumps(FULL)
    assert second == dict.fromkeys(KEYS) | absent
    assert atropos.get("/latest_example") == second


def test_lists_and_buffers_are_counted(atropos: RunningAtropos) -> None:
    atropos.begin()
    env_id = atropos.join(group_size=4)
    assert atropos.post("/scored_data_list", []) == {"status": "received", "groups_processed": 0}
    assert atropos.post("/scored_data", scored(1, 3, env_id)) == {
        "status": "buffered",
        "buffer_size": 3,
    }
    posted = [scored(2, 4, env_id), scored(3, 2, env_id), scored(4, 1, env_id)]
    assert atropos.post("/scored_data_list", posted) == {
        "status": "received",
        "groups_processed": 3,
        "buffered": 2,
        "last_buffer_size": 2,
    }
    assert atropos.get("/status") == {"current_step": 0, "queue_size": 3}


def test_batches_come_in_the_order_of_their_groups(atropos: RunningAtropos) -> None:
    atropos.begin()
    for score in range(5):
        atropos.post("/scored_data", scored(score))
    assert atropos.batch_scores() == [[0.0] * 4, [1.0] * 4]
    assert atropos.get("/status") == {"current_step": 1, "queue_size": 3}
    assert atropos.batch_scores() == [[2.0] * 4, [3.0] * 4]
    assert atropos.batch_scores() is None


def test_an_environment_polls_with_a_body(atropos: RunningAtropos) -> None:
    atropos.begin()
    env_id = atropos.join(weight=0.0)
    assert atropos.get("/status-env", {"env_id": str(env_id)}) == {
        "current_step": 0,
        "queue_size": 0,
        "unallocated_fraction": 1.0,
        "self_queue_size": 0,
        "max_group_size": 1,
        "env_weight": 0.01,
    }
    assert atropos.ask("GET", f"/status-env?env_id={env_id}").status == 422
    assert atropos.ask("GET", "/status-env", {"env_id": 5}).status == 404


def test_a_reset_forgets_all_but_the_latest_example(atropos: RunningAtropos) -> None:
    atropos.begin()
    atropos.join()
    atropos.post("/scored_data", scored(5))
    reply = atropos.ask("GET", "/reset_data")
    assert (reply.status, reply.body) == (200, "Reset successful")
    assert reply.headers["content-type"].startswith("text/plain")
    assert atropos.get("/info") == {"batch_size": -1, "max_token_len": 512}
    assert atropos.get("/batch")["status"] == "error"
    assert atropos.get("/latest_example")["scores"] == [5.0] * 4


def test_numbers_are_taken_as_strings_and_the_like(atropos: RunningAtropos) -> None:
    atropos.begin(batch_size="1", num_steps=2.0)
    odd = {"tokens": [["16", 2.0]], "masks": [[1, 2]], "scores": [True], "env_id": "0"}
    assert atropos.post("/scored_data", odd) == {"status": "received"}
    (group,) = atropos.get("/batch")["batch"]
    assert (group["tokens"], group["scores"], group["env_id"]) == ([[16, 2]], [1.0], 0)


def test_integers_are_as_long_as_they_are(atropos: RunningAtropos) -> None:
    """Seeds and uuids are often longer than what parsers of JSON hold."""
    long = 2**100
    fields = {
        "messages": [[{"role": "user", "content": "x", "id": long}], []],
        "generation_params": {"seed": long},
        "overrides": [{"seed": -long}, {"é": [1.5, None]}],
        "group_overrides": {"uuid": long},
        "images": long,
        "distill_token_ids": [[[long]]],
    }
    posted = FULL | fields | {"unknown": long}
    assert atropos.post("/scored_data", posted) == {"status": "received"}
    assert atropos.get("/latest_example") == FULL | fields
    told = {"status": "received", "groups_processed": 2}
    assert atropos.post("/scored_data_list", [FULL, posted]) == told
    assert atropos.get("/latest_example") == FULL | fields


def test_of_fields_with_one_name_the_last_one_counts(atropos: RunningAtropos) -> None:
    text = json.dumps(scored(1.0)).encode()[:-1] + b', "scores": [2.0]}'
    assert atropos.post("/scored_data", text) == {"status": "received"}
    assert atropos.get("/latest_example")["scores"] == [2.0]


GOOD = scored(1.0)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"masks": [], "scores": []}, ["body", "tokens"]),
        (GOOD | {"tokens": [[1.5]]}, ["body", "tokens", 0, 0]),
        (GOOD | {"tokens": [[None]]}, ["body", "tokens", 0, 0]),
        (GOOD | {"tokens": [[2**31]]}, ["body", "tokens", 0, 0]),
        (GOOD | {"scores": [float("nan")]}, ["body", "scores", 0]),
        (GOOD | {"advantages": [[float("inf")]]}, ["body", "advantages", 0, 0]),
        (GOOD | {"messages": [[{"role": "user"}]]}, ["body", "messages", 0, 0, "content"]),
        (GOOD | {"messages": [[None]]}, ["body", "messages", 0, 0]),
        (GOOD | {"images": [float("nan")]}, ["body", "images"]),
        (GOOD | {"overrides": [1]}, ["body", "overrides", 0]),
        (GOOD | {"tokens": [[2**70]]}, ["body", "tokens", 0, 0]),
        (GOOD | {"env_id": 2**70}, ["body", "env_id"]),
        (GOOD | {"images": "\ud800"}, ["body", 0]),
        (
            b'{"tokens":[[1,[2]]],"masks":[],"scores":[],"images":"\\u005b"}',
            ["body", "tokens", 0, 1],
        ),
        (b"{", ["body", 1]),
        (b"", ["body"]),
        (b"null", ["body"]),
    ],
)
def test_what_cannot_be_used_is_refused_in_fastapis_words(
    atropos: RunningAtropos, body: Any, place: list[Any]
) -> None:
    reply = atropos.ask("POST", "/scored_data", body, JSON)
    assert reply.status == 422
    problem = reply.body["detail"][0]
    assert problem["loc"] == place
    assert {"type", "msg", "input"} <= problem.keys()
    assert atropos.get("/status")["queue_size"] == 0


@pytest.mark.parametrize(
    ("path", "body", "wrong"),
    [
        ("/register", TRAINING, {"wandb_group": "\ud800"}),
        ("/register", TRAINING, {"checkpoint_dir": "\ud800"}),
        ("/register", TRAINING, {"batch_size": 2**63}),
        ("/register-env", ENV, {"desired_name": "\ud800"}),
        ("/register-env", ENV, {"max_token_length": 10**400}),
        ("/register-env", ENV, {"min_batch_allocation": 1e308}),
    ],
)
def test_registrations_that_cannot_be_counted_with_are_refused(
    atropos: RunningAtropos, path: str, body: Any, wrong: Any
) -> None:
    reply = atropos.ask("POST", path, body | wrong)
    assert reply.status == 422
    assert reply.body["detail"][0]["loc"] == ["body", *wrong]


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"tokens": "\xe9"}'])
@pytest.mark.parametrize("path", ["/scored_data", "/register"])
def test_what_json_cannot_be_read_from_is_refused_in_fastapis_words(
    atropos: RunningAtropos, path: str, body: bytes
) -> None:
    told = {"detail": "There was an error parsing the body"}
    assert atropos.ask("POST", path, body, JSON)[:2] == (400, told)


@pytest.mark.parametrize("path", ["/scored_data", "/register"])
def test_other_bodies_than_objects_are_refused_in_the_same_words(
    atropos: RunningAtropos, path: str
) -> None:
    for body, headers, quoted in ((b"[]", JSON, []), (b"x", {"content-type": "text/x"}, "x")):
        (problem,) = atropos.ask("POST", path, body, headers).body["detail"]
        assert (problem["type"], problem["input"]) == ("model_attributes_type", quoted)


def test_a_list_is_taken_whole_or_not_at_all(atropos: RunningAtropos) -> None:
    assert atropos.ask("POST", "/scored_data_list", [GOOD, {"tokens": []}]).status == 422
    assert atropos.ask("POST", "/scored_data_list", GOOD).status == 422
    assert atropos.get("/status")["queue_size"] == 0


def test_json_needs_its_content_type(atropos: RunningAtropos) -> None:
    body = json.dumps(GOOD).encode()
    assert atropos.ask("POST", "/scored_data", body, {}).status == 422
    assert atropos.ask("POST", "/register", body, {}).status == 422
    for kind in ("text/json", "application/x+jsonx"):
        assert atropos.ask("POST", "/scored_data", body, {"content-type": kind}).status == 422


def test_unknown_paths_and_methods_are_fastapis(atropos: RunningAtropos) -> None:
    assert atropos.ask("GET", "/nothing")[:2] == (404, {"detail": "Not Found"})
    assert atropos.ask("GET", "/scored_data")[:2] == (405, {"detail": "Method Not Allowed"})
    assert atropos.ask("HEAD", "/batch").status == 405
    assert atropos.ask("GET", "/docs").status == 200
    paths = atropos.get("/openapi.json")["paths"]
    assert {"/register", "/scored_data", "/batch", "/status-env", "/reset_data"} <= paths.keys()


def test_large_answers_are_compressed_when_that_is_asked_for(atropos: RunningAtropos) -> None:
    atropos.begin(batch_size=4)
    accepts = {"accept-encoding": "gzip, deflate"}
    for headers in (accepts, {}):
        atropos.post("/scored_data", scored(1.0, tokens=400))
        reply = atropos.ask("GET", "/batch", None, headers)
        assert len(reply.body["batch"]) == 1
        assert reply.headers.get("content-encoding") == ("gzip" if headers else None)
        assert "Accept-Encoding" in reply.headers["vary"]
    assert (
        atropos.ask("GET", "/latest_example", None, accepts).headers["content-encoding"] == "gzip"
    )
    assert "content-encoding" not in atropos.ask("GET", "/info", None, accepts).headers
    assert "content-encoding" not in atropos.ask("GET", "/batch", None, accepts).headers


def test_compressed_posts_are_read(atropos: RunningAtropos) -> None:
    text = json.dumps(GOOD).encode()
    zipped = JSON | {"content-encoding": "GZip"}
    whole = gzip.compress(text)
    members = gzip.compress(text[:9]) + gzip.compress(text[9:])
    for body in (whole, members, whole + bytes(9)):
        assert atropos.ask("POST", "/scored_data", body, zipped).body == {"status": "received"}
    training = gzip.compress(json.dumps(TRAINING).encode())
    assert "uuid" in atropos.ask("POST", "/register", training, zipped).body
    for broken in (b"no gzip", whole[:-9]):
        reply = atropos.ask("POST", "/scored_data", broken, zipped)
        assert reply[:2] == (400, "Invalid gzip payload")
    assert atropos.ask("POST", "/scored_data", b"", zipped).status == 422


def test_a_bomb_is_refused_before_it_is_inflated(atropos: RunningAtropos) -> None:
    bomb = zlib.compressobj(9, wbits=31)
    body = b"".join(bomb.compress(b" " * 1_000_000) for _ in range(200)) + bomb.flush()
    reply = atropos.ask("POST", "/scored_data", body, JSON | {"content-encoding": "gzip"})
    assert reply.status == 413
    assert "67,108,864 bytes" in reply.body["detail"]


def test_a_group_that_no_record_holds_is_refused(atropos: RunningAtropos) -> None:
    huge = scored(1.0, size=1) | {"images": "x" * 9_000_000}
    reply = atropos.ask("POST", "/scored_data", huge)
    assert reply.status == 413
    assert atropos.post("/scored_data", GOOD) == {"status": "received"}


def test_of_a_list_with_a_group_that_no_record_holds_nothing_is_taken(
    atropos: RunningAtropos,
) -> None:
    huge = scored(1.0, size=1) | {"images": "x" * 9_000_000}
    before = atropos.get("/status")["queue_size"]
    assert atropos.ask("POST", "/scored_data_list", [GOOD, huge, GOOD]).status == 413
    assert atropos.get("/status")["queue_size"] == before
    told = {"status": "received", "groups_processed": 2}
    assert atropos.post("/scored_data_list", [GOOD, GOOD]) == told


def test_any_page_may_call_it(atropos: RunningAtropos) -> None:
    page = {"origin": "http://page", "content-type": "application/json"}
    for method, path, body in (("GET", "/info", None), ("POST", "/scored_data", GOOD)):
        reply = atropos.ask(method, path, body, page)
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] in ("*", "http://page")
        assert reply.headers["access-control-allow-credentials"] == "true"
