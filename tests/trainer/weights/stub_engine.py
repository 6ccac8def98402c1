"""An engine without a model: it takes weights as vLLM does, in a real process group, or fails as told.

It has vLLM's oddities that matter to a trainer: an update that was begun must be ended before the next,
and what a broken one had received counts towards the next unless that is done. It runs as a process of
its own, so that it can be killed.

    POST /stub/fault     {"phase": "update", "kind": "fail"}, once; see `Stub.trouble`
    GET  /stub/seen      the control calls so far
    GET  /stub/weights   {name: sum of its values} of each worker
"""

import json
import multiprocessing
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from tests.conftest import free_port
from trainer.weights.gloo_group import GlooInit, GlooReceiver, GlooUpdate

HOST = "127.0.0.1"
PHASES = {
    "/pause": "pause",
    "/init_weight_transfer_engine": "join",
    "/start_weight_update": "start",
    "/update_weights": "update",
    "/finish_weight_update": "finish",
    "/resume": "resume",
}
Json = dict[str, Any]


class Refused(Exception):
    pass


@dataclass
class Stub:
    world_size: int
    adapter_rank: int | None = None
    label: str = "default"
    paused: bool = False
    active: bool = False
    torn: bool = False
    faults: dict[str, str] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    pauses: list[str] = field(default_factory=list)
    workers: list[GlooReceiver] = field(default_factory=list)
    received: dict[int, list[tuple[str, torch.Tensor]]] = field(default_factory=dict)
    weights: dict[int, Json] = field(default_factory=dict)

    def get(self, path: str) -> Json:
        if path == "/weight_info":
            self.trouble("look" if not self.seen or self.seen[-1] != "finish" else "confirm")
            return {"weight_version": self.label}
        answers: dict[str, Json] = {
            "/is_paused": {"is_paused": self.paused},
            "/get_world_size": {"world_size": self.world_size},
            "/server_info?config_format=json": {"vllm_config": self.config()},
            "/stub/seen": {"seen": self.seen, "pauses": self.pauses},
            "/stub/weights": {"weights": [self.weights[rank] for rank in sorted(self.weights)]},
        }
        return answers[path]

    def config(self) -> Json:
        """As vLLM tells it; with LoRA layers if there is a rank."""
        lora = self.adapter_rank and {"max_lora_rank": self.adapter_rank}
        return {"lora_config": lora, "weight_transfer_config": {"backend": "gloo"}}

    def post(self, path: str, body: Json) -> Json:
        path, _, query = path.partition("?")
        if path == "/stub/fault":
            self.faults[body["phase"]] = body["kind"]
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        else:
            phase = PHASES[path]
            self.seen.append(phase)
            if phase == "pause":
                self.pauses.append(query)
            self.trouble(phase)
            getattr(self, phase)(body)
        return {}

    def trouble(self, phase: str) -> None:
        """fail: it says no; hang: no answer; die: as with kill -9. In the middle of an update the same
        under the name `midway`."""
        kind = self.faults.pop(phase, "")
        if kind == "fail":
            raise Refused("told to fail")
        if kind == "hang":
            threading.Event().wait()
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)

    def pause(self, _: Json) -> None:
        self.paused = True

    def resume(self, _: Json) -> None:
        if self.active or self.torn:
            raise Refused("this would serve a torn model")
        self.paused = False

    def join(self, body: Json) -> None:
        for worker in self.workers:
            worker.close()
        meeting = GlooInit(**body["init_info"])
        self.workers = self.on_each(lambda rank: GlooReceiver(meeting, rank))

    def start(self, _: Json) -> None:
        if self.active:
            raise Refused("an update is active already")
        self.active = self.torn = True

    def update(self, body: Json) -> None:
        if not self.active:
            raise Refused("no update is active")
        delivery = GlooUpdate(**body["update_info"])
        try:
            self.on_each(lambda rank: self.receive(rank, delivery))
        except BaseException:
            self.active = False
            for worker in self.workers:
                worker.close()
            raise

    def receive(self, rank: int, delivery: GlooUpdate) -> None:
        for tensors in self.workers[rank].receive(delivery):
            self.received.setdefault(rank, []).extend(tensors)
            self.trouble("midway")

    def finish(self, body: Json) -> None:
        if not self.active:
            raise Refused("no update is active")
        label = body.get("weight_version")
        for rank, tensors in self.received.items():
            names = [name for name, _ in tensors]
            if label and len(set(names)) < len(names):
                raise Refused("some weights came twice, others never")
            self.weights[rank] = {name: float(each.double().sum()) for name, each in tensors}
        self.received = {}
        self.active = False
        self.torn = label is None
        self.label = label or self.label

    def on_each(self, call: Any) -> list[Any]:
        """On all workers at once: they meet in the group."""
        results: dict[int, Any] = {}
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                results[rank] = call(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise Refused(str(errors[0]))
        return [results[rank] for rank in range(self.world_size)]


def serve(port: int, world_size: int, adapter_rank: int | None) -> None:
    stub = Stub(world_size, adapter_rank)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(lambda: stub.get(self.path))

        def do_POST(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length) or b"{}")
            self.answer(lambda: stub.post(self.path, body))

        def answer(self, make: Any) -> None:
            try:
                status, body = 200, make()
            except Refused as error:
                status, body = 500, {"error": {"message": str(error)}}
            with suppress(OSError):  # the trainer may have given up
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer((HOST, port), Handler)
    server.daemon_threads = True
    server.serve_forever()


# Forked from a process that has torch already, and none of the test's threads.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


class StubEngine:
    """A running stub, seen from a test."""

    def __init__(self, world_size: int = 1, adapter_rank: int | None = None) -> None:
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.world_size = world_size
        self.adapter_rank = adapter_rank
        self.start()

    def start(self) -> None:
        """Again after a kill: with the weights that it had at first, under the same address."""
        self.process = _processes.Process(
            target=serve, args=(self.port, self.world_size, self.adapter_rank), daemon=True
        )
        self.process.start()
        deadline = time.monotonic() + 120  # the first waits until torch is imported
        while True:
            try:
                self.seen()
                return
            except OSError:
                assert time.monotonic() < deadline, "the stub engine did not start"
                time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def fault(self, phase: str, kind: str) -> None:
        self._ask("/stub/fault", {"phase": phase, "kind": kind})

    def seen(self) -> list[str]:
        return list(self._ask("/stub/seen")["seen"])

    def cleared_caches(self) -> list[bool]:
        """Whether it emptied its caches, for every time that it was paused."""
        return ["clear_cache=true" in query for query in self._ask("/stub/seen")["pauses"]]

    def weights(self) -> list[dict[str, float]]:
        """Of each worker."""
        return list(self._ask("/stub/weights")["weights"])

    def label(self) -> str:
        return str(self._ask("/weight_info")["weight_version"])

    def paused(self) -> bool:
        return bool(self._ask("/is_paused")["is_paused"])

    def _ask(self, path: str, body: Json | None = None) -> Json:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(self.url + path, data, timeout=60) as response:
            return dict(json.load(response))


@contextmanager
def running_stubs(*world_sizes: int) -> Iterator[list[StubEngine]]:
    engines = [StubEngine(size) for size in world_sizes]
    try:
        yield engines
    finally:
        for engine in engines:
            engine.kill()
