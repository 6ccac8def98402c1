"""The comparison of log-probs with an engine's."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pytest

from trainer.weights.engine import EngineCallFailed
from trainer.weights.logprob_check import LogprobMismatch, compare_logprobs

SAMPLED = [7, 8, 9]
VALUES = [-0.5, -1.0, -2.0]


@contextmanager
def answering(answer: Any) -> Iterator[tuple[str, list[Any]]]:
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def choice(ids: list[int], values: list[float]) -> Any:
    content = [{"logprob": value} for value in values]
    return {"choices": [{"token_ids": ids, "logprobs": {"content": content}}]}


def test_the_trainer_is_asked_about_the_ids_that_the_engine_sampled() -> None:
    seen: list[list[int]] = []

    def ours(ids: Any, temperature: float) -> Any:
        seen.append(ids.tolist())
        return np.array([9.0, 9.0, -0.5, -1.25, -2.5]) - (temperature == 1)

    with answering(choice(SAMPLED, VALUES)) as (url, asked):
        found = compare_logprobs(url, [1, 2], ours, tokens=3)
    assert seen[0] == [1, 2, 7, 8, 9]
    assert asked[0]["token_ids"] == [1, 2]
    assert asked[0]["sampling_params"]["max_tokens"] == 3
    assert (found.tokens, found.mean, found.max) == (3, 0.25, 0.5)
    found.check(0.25)
    with pytest.raises(LogprobMismatch, match=f"engine {url} and the trainer differ by 0.25"):
        found.check(0.2)


def test_a_difference_that_is_no_number_is_a_disagreement() -> None:
    with answering(choice(SAMPLED, VALUES)) as (url, _):
        found = compare_logprobs(url, [1], lambda ids, _: np.full(len(ids), np.nan, np.float32))
    with pytest.raises(LogprobMismatch):
        found.check(1e9)


@pytest.mark.parametrize(
    ("values", "returned"),
    [
        (VALUES, "log-probs from before the temperature"),
        ([3.5, -1.0, 0.25], "returns logits"),
    ],
)
def test_an_engine_with_another_logprobs_mode_is_told_which_to_set(
    values: list[float], returned: str
) -> None:
    """Both have the same weights, and the difference is below the limit."""

    def ours(ids: Any, temperature: float) -> Any:
        return np.array([0.0, *VALUES]) / temperature

    with answering(choice(SAMPLED, values)) as (url, asked):
        found = compare_logprobs(url, [1], ours, tokens=3)
    assert asked[0]["sampling_params"]["temperature"] != 1
    with pytest.raises(LogprobMismatch, match=f"engine {url} .*--logprobs-mode processed_logprobs"):
        found.check(9.0)
    with pytest.raises(LogprobMismatch, match=returned):
        found.check(9.0)


@pytest.mark.parametrize("answer", [{}, {"choices": []}, choice([7], []), choice([], []), [1]])
def test_an_odd_answer_is_the_engines_failure(answer: Any) -> None:
    with (
        answering(answer) as (url, _),
        pytest.raises(EngineCallFailed, match="in phase generate"),
    ):
        compare_logprobs(url, [1], lambda ids, _: np.zeros(len(ids), np.float32))
