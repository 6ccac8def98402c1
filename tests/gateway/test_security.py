"""Keys, signed URLs, tenants and limits."""

import hashlib
import http.client
import json
import urllib.parse
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pool.connection import Connection
from tests.gateway.client import (
    HELLO,
    chat,
    error,
    eventually,
    in_background,
    log_of,
    only_step,
    said,
    steps,
)
from tests.gateway.running import Reply, RunningGateway, running_gateway
from tests.gateway.stub_engine import StubEngine
from tests.steplog.command import reaching, steplog

pytestmark = pytest.mark.broker

ALICE = "alice-key-0123456789"
BOB = "bob-key-9876543210-xyz"
MAX_BODY = 20_000
MAX_REQUESTS = 4
MAX_OPEN = 30


@pytest.fixture(scope="module")
def locked(
    log: Connection, stub: StubEngine, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """Alice's key comes by the environment, Bob's as a hash in a file."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    digest = hashlib.sha256(BOB.encode()).hexdigest()
    file.write_text(f"# keys\n\nbob:sha256:{digest}\n")
    options = ["--keys-file", str(file), "--host", "0.0.0.0"]
    options += ["--max-body-bytes", str(MAX_BODY), "--max-requests", str(MAX_REQUESTS)]
    options += ["--max-open-trajectories", str(MAX_OPEN)]
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("STEPLOG_GATEWAY_KEYS", f"alice:{ALICE}")
            starting = running_gateway(log, [stub.url], tokenizer, *options)
            running = stack.enter_context(starting)
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def init(gateway: RunningGateway, key: str = ALICE, **body: Any) -> tuple[str, str]:
    """A trajectory's uid and the path of its base URL."""
    reply = gateway.post("/init_trajectory", body, bearer(key))
    assert reply.status == 200, reply
    return reply.body["trajectory_uid"], urllib.parse.urlsplit(reply.body["base_url"]).path


def ask(gateway: RunningGateway, path: str, **body: Any) -> Reply:
    return gateway.post(f"{path}/chat/completions", {"messages": HELLO, **body})


# Keys


@pytest.mark.parametrize("headers", [bearer(ALICE), bearer(BOB), {"x-api-key": ALICE}])
@pytest.mark.parametrize("route", ["/init_trajectory", "/generate"])
def test_a_key_opens_the_routes_without_a_trajectory(
    locked: RunningGateway, headers: dict[str, str], route: str
) -> None:
    assert locked.post(route, {"prompt_ids": [5]}, headers).status == 200


@pytest.mark.parametrize(
    "headers", [{}, bearer(""), bearer("wrong-key-0123456789"), {"x-api-key": ALICE[:-1]},
                {"authorization": f"Basic {ALICE}"}],
)  # fmt: skip
@pytest.mark.parametrize(
    "route",
    ["/init_trajectory", "/generate", "/submit_steps", "/compute_reward", "/v1/chat/completions",
     "/v1/responses", "/v1/completions"],
)  # fmt: skip
def test_without_a_right_key_they_are_401(
    locked: RunningGateway, headers: dict[str, str], route: str
) -> None:
    reply = locked.post(route, {"prompt_ids": [5]}, headers)
    assert reply.status == 401
    assert (error(reply)["type"], error(reply)["code"]) == (
        "authentication_error",
        "invalid_api_key",
    )


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_missing_key_is_told_in_anthropics_shape(locked: RunningGateway, route: str) -> None:
    reply = locked.post(route, {"messages": HELLO, "max_tokens": 1})
    assert reply.status == 401
    assert reply.body["error"]["type"] == "authentication_error"


def test_models_need_a_key_or_a_signed_url(locked: RunningGateway) -> None:
    _, path = init(locked)
    assert locked.get(f"{path}/models").status == 200
    assert locked.get("/v1/models", bearer(ALICE)).status == 200
    assert locked.get("/v1/models").status == 401
    assert locked.get("/t/p/v1/models").status == 401


def test_health_and_readiness_need_no_key(locked: RunningGateway) -> None:
    assert locked.get("/health").status == 200
    assert locked.get("/ready").status == 200


def test_the_real_clients_send_keys_as_they_are_expected(locked: RunningGateway) -> None:
    import anthropic
    import openai

    messages: Any = [{"role": "user", "content": "hi"}]
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=ALICE, max_retries=0) as client:
        client.chat.completions.create(model="", messages=messages, max_tokens=1)
    with anthropic.Anthropic(base_url=locked.url, api_key=BOB, max_retries=0) as claude:
        claude.messages.create(model="", messages=messages, max_tokens=1)


# Signed URLs


def test_a_signed_url_works_without_a_key(locked: RunningGateway) -> None:
    uid, path = init(locked, prompt_uid="p")
    assert ask(locked, path).status == 200
    assert locked.post(f"{path}/register_trajectory", {"metadata": {}}).status == 200
    assert locked.post(f"{path}/complete_trajectory", {"reward": 1}).status == 200
    assert locked.post(f"{path}/feedback", {"reward": 1}).status == 200
    assert (only_step(locked, uid).tenant, only_step(locked, uid).prompt_uid) == (
        "alice",
        "alice/p",
    )


def test_its_prompt_may_be_changed(locked: RunningGateway) -> None:
    uid, path = init(locked)
    segment = path.split("/")[1]
    assert ask(locked, f"/{segment}/mine/v1").status == 200
    assert only_step(locked, uid).prompt_uid == "alice/mine"


def test_an_unsigned_pair_is_401_with_and_without_a_key(
    locked: RunningGateway, uid: str, prompt_uid: str
) -> None:
    for headers in ({}, bearer(ALICE)):
        reply = chat(locked, uid, prompt_uid, headers=headers)
        assert reply.status == 401
        assert error(reply)["code"] == "unsigned_base_url"
    assert log_of(locked, uid) == []


def test_a_signature_is_for_no_other_trajectory_tenant_or_time(locked: RunningGateway) -> None:
    uid, path = init(locked)
    other, _ = init(locked)
    signed = path.split("/")[1]
    token = signed.partition("~")[2]
    tenant, expires, signature = token.split(".")
    forged = [
        f"{other}~{token}",
        f"{uid}~bob.{expires}.{signature}",
        f"{uid}~{tenant}.{int(expires) + 1000}.{signature}",
        f"{uid}~{tenant}.{expires}.{signature[:-1]}",
        f"{uid}~{tenant}.{expires}.",
        f"{uid}~",
        f"{uid}~~..",
        f"{uid}~{tenant}.x.{signature}",
    ]
    for segment in forged:
        assert ask(locked, f"/{segment}/p/v1").status == 401, segment
    assert steps(locked, uid) == []


def test_an_expired_url_is_refused(locked: RunningGateway) -> None:
    uid, path = init(locked, deadline_s=0.5)
    eventually(lambda: locked.get(f"{path}/models").status == 404)
    reply = ask(locked, path)
    assert reply.status == 404
    assert error(reply)["code"] == "expired_base_url"
    assert steps(locked, uid) == []


# Tenants


def step(uid: str, prompt_uid: str = "shared", **fields: Any) -> dict[str, Any]:
    ids = {"prompt_ids": [1, 2], "response_ids": [3], "rollout_log_probs": [-0.5]}
    return {"steps": [{"trajectory_uid": uid, "prompt_uid": prompt_uid, **ids, **fields}]}


@pytest.mark.parametrize("closed", [False, True])
def test_a_tenant_cannot_write_to_anothers_trajectory(locked: RunningGateway, closed: bool) -> None:
    uid, path = init(locked, ALICE, prompt_uid="shared")
    ask(locked, path)
    if closed:
        locked.post(f"{path}/complete_trajectory")
    before = len(log_of(locked, uid))
    reply = locked.post("/submit_steps", step(uid), bearer(BOB))
    assert reply.status == 404
    assert error(reply)["message"] == (
        f"Trajectory {uid} does not exist. A trajectory begins with POST /init_trajectory or with its "
        "first call."
    )
    assert len(log_of(locked, uid)) == before


def test_tenants_share_no_groups(locked: RunningGateway) -> None:
    mine, path = init(locked, ALICE, prompt_uid="shared")
    theirs, other = init(locked, BOB, prompt_uid="shared")
    ask(locked, path)
    ask(locked, other)
    assert only_step(locked, mine).prompt_uid != only_step(locked, theirs).prompt_uid


def test_submitted_steps_are_the_tenants(locked: RunningGateway, uid: str) -> None:
    assert locked.post("/submit_steps", step(uid), bearer(BOB)).body == {"accepted": 1}
    found = only_step(locked, uid)
    assert (found.tenant, found.prompt_uid) == ("bob", "bob/shared")


# Limits


@pytest.mark.parametrize("route", ["/init_trajectory", "chat"])
@pytest.mark.parametrize("declared", [True, False])
def test_a_body_too_large_is_413(locked: RunningGateway, route: str, declared: bool) -> None:
    if route == "chat":
        route = init(locked)[1] + "/chat/completions"
    body = b'{"metadata": {"x": "' + b"x" * MAX_BODY + b'"}}'
    connection = http.client.HTTPConnection("127.0.0.1", locked.port, timeout=60)
    parts = body if declared else iter([body[:100], body[100:]])
    connection.request(
        "POST", route, parts, bearer(ALICE) | {"content-type": "application/json"},
        encode_chunked=not declared,
    )  # fmt: skip
    response = connection.getresponse()
    assert response.status == 413
    assert "20,000 bytes" in json.loads(response.read())["error"]["message"]
    connection.close()


def test_a_body_of_the_largest_size_is_taken(locked: RunningGateway) -> None:
    head, tail = b'{"metadata": {"x": "', b'"}}'
    body = head + b"x" * (MAX_BODY - len(head) - len(tail)) + tail
    assert locked.post("/init_trajectory", body, bearer(ALICE)).status == 200


def test_too_many_requests_at_once_are_429_for_this_tenant_only(
    locked: RunningGateway, stub: StubEngine
) -> None:
    mine = [init(locked, ALICE)[1] for _ in range(MAX_REQUESTS + 1)]
    _, theirs = init(locked, BOB)
    stub.script([said("slow", hold=0)] * MAX_REQUESTS)
    with in_background() as submit:
        sent = [submit(ask, locked, path) for path in mine[:MAX_REQUESTS]]
        eventually(lambda: stub.waiting() == 0)
        reply = ask(locked, mine[-1])
        assert reply.status == 429
        assert int(reply.headers["retry-after"]) > 0
        error(reply)
        assert ask(locked, theirs).status == 200
        stub.release()
        assert {one.result().status for one in sent} == {200}
    assert ask(locked, mine[-1]).status == 200


def test_too_many_open_trajectories_are_429_until_one_is_completed(
    locked: RunningGateway,
) -> None:
    begun: list[str] = []
    while (reply := locked.post("/init_trajectory", {"channel": "c"}, bearer(BOB))).status == 200:
        begun.append(urllib.parse.urlsplit(reply.body["base_url"]).path)
        assert len(begun) <= MAX_OPEN
    assert reply.status == 429
    assert f"Too many open trajectories (limit {MAX_OPEN})." in error(reply)["message"]
    assert ask(locked, begun[0]).status == 200
    assert locked.post(f"{begun[0]}/complete_trajectory").status == 200
    assert locked.post("/init_trajectory", {"channel": "c"}, bearer(BOB)).status == 200
    assert locked.post("/init_trajectory", {"channel": "c"}, bearer(ALICE)).status == 200


# Starting


def start(log: Connection, tokenizer: Path, *options: str, **variables: str) -> tuple[int, str]:
    common = [*reaching(log), "--tokenizer", str(tokenizer), "--engines", "http://127.0.0.1:9"]
    done = steplog("gateway", *common, "--port", "0", *options, **variables)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_listening_wider_without_keys_is_refused_in_one_sentence(
    log: Connection, tokenizer: Path, host: str
) -> None:
    status, told = start(log, tokenizer, "--host", host)
    assert status == 2
    assert len(told.splitlines()) == 1
    assert "--keys-file" in told and "--insecure" in told


@pytest.mark.parametrize(
    "keys",
    ["alice:tooshort", "alice:sha256:abcd"],
)
def test_keys_that_cannot_be_used_are_refused_and_not_told(
    log: Connection, tokenizer: Path, keys: str
) -> None:
    status, told = start(log, tokenizer, STEPLOG_GATEWAY_KEYS=keys)
    assert status in (1, 2)
    assert len(told.splitlines()) == 1
    assert "Traceback" not in told
    secret = keys.rpartition(":")[2].strip()
    assert not secret or secret not in told.replace("sha256:HEX", "")


def test_a_keys_file_that_cannot_be_read_is_told(
    log: Connection, tokenizer: Path, tmp_path: Path
) -> None:
    status, told = start(log, tokenizer, "--keys-file", str(tmp_path / "none"))
    assert status == 1
    assert told.splitlines() == [
        f"steplog: Cannot read the keys file {tmp_path / 'none'}: No such file or directory"
    ]


def test_keys_are_never_in_the_log(locked: RunningGateway) -> None:
    """After all that was tried above."""
    init(locked)
    written = locked.log.read_text()
    assert "Listening" in written
    for secret in (ALICE, BOB, hashlib.sha256(BOB.encode()).hexdigest(), "wrong-key"):
        assert secret not in written
