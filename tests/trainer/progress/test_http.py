"""The trainer's state over HTTP."""

import time
import urllib.error
import urllib.request

import pytest

from servicekit.process import listen
from trainer import http, metrics


class Served:
    def __init__(self) -> None:
        self.progressed = time.monotonic()
        listener = listen("127.0.0.1", 0)
        listener.listen()  # who asks before the server is up waits for it
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = http.serve(listener, lambda: self.progressed, stalled_after=60)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.read().decode()


@pytest.fixture
def served() -> Served:
    return Served()


def test_it_is_ready_while_something_moves(served: Served) -> None:
    assert served.get("/ready") == (200, '{"status":"ready"}')
    served.progressed -= 90
    status, told = served.get("/ready")
    assert status == 503 and "no phase changed for 9" in told
    assert served.get("/health") == (200, '{"status":"ok"}')
    metrics.policy_version.set(7)
    status, told = served.get("/metrics")
    assert status == 200 and "policy_version 7.0" in told
    served.server.should_exit = True
