"""Sending new weights to engines, compared with a bare broadcast of the same bytes.

    python -m bench.weights                    gloo on CPUs, a small model
    python -m bench.weights --transport nccl   a Qwen2 of 0.5e9 parameters; needs a GPU
    … --kill                                   also kills one of two engines during a transfer

The sender is the trainer's own `EngineFleet.sync`, with all phases over HTTP. An engine is a process
that answers vLLM's control routes and receives with the code that runs in vLLM's workers; its model
only copies what it receives. With NCCL all processes share one GPU, and each pretends to be a host of
its own, so that both measurements go over sockets. On a machine without vLLM see `bench.vllm_files`.
"""

import argparse
import json
import multiprocessing
import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from bench.shapes import QWEN_05B
from pool.core.versions import Version
from trainer.weights.fleet import EngineFleet
from trainer.weights.settings import WeightsSettings
from trainer.weights.source import ModuleSource, total_bytes
from trainer.weights.sync import SyncReport

HOST = "127.0.0.1"
ROUNDS = 7
SHAPES = {
    "nccl": QWEN_05B,
    "gloo": {
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
}
DEVICES = {"nccl": "cuda", "gloo": "cpu"}


class Receiver:
    """An engine: vLLM's control routes and receiving code, around a model that only stores weights."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.device = (
            torch.device(DEVICES[transport], 0) if transport == "nccl" else torch.device("cpu")
        )
        self.label = "default"
        self.paused = False
        self.die = False
        self.stored: dict[str, torch.Tensor] = {}
        self.engine = self._make_engine()

    def _make_engine(self) -> Any:
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config = SimpleNamespace(parallel_config=parallel, model_config=None, lora_config=None)
        model = SimpleNamespace(load_weights=self.load, modules=lambda: ())
        from trainer.weights.worker import GlooEngine, NcclEngine

        kind = {"nccl": NcclEngine, "gloo": GlooEngine}[self.transport]
        return kind(None, config, self.device, model)

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name in self.stored:
                self.stored[name].copy_(tensor)
            else:
                self.stored[name] = tensor.clone()
        if self.die:
            os.kill(os.getpid(), 9)

    def get(self, path: str) -> dict[str, Any]:
        if path == "/check":
            return {"check": {name: checksum(each) for name, each in self.stored.items()}}
        return {"weight_version": self.label, "is_paused": self.paused, "world_size": 1}

    def post(self, path: str, body: dict[str, Any]) -> None:
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        elif path == "/init_weight_transfer_engine":
            engine = self.engine
            engine.init_transfer_engine(engine.parse_init_info(body["init_info"]))
        elif path == "/update_weights":
            self.engine.update_weights(body["update_info"])
        elif path == "/finish_weight_update":
            self.label = body.get("weight_version", self.label)
        elif path == "/die":
            self.die = True
        elif path == "/bare":
            broadcast(self.transport, 1, self.device, body["bytes"], body["port"])


def checksum(tensor: torch.Tensor) -> int:
    return int(tensor.detach().contiguous().view(-1).view(torch.uint8).to(torch.int64).sum().item())


def broadcast(transport: str, rank: int, device: torch.device, size: int, port: int) -> list[float]:
    """Broadcasts `size` bytes with torch's process group; returns the seconds of each round."""
    dist.init_process_group(
        transport, init_method=f"tcp://{HOST}:{port}", rank=rank, world_size=2, device_id=None
    )
    flat = torch.zeros(size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        dist.broadcast(flat, 0)
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    dist.destroy_process_group()
    return seconds


def serve(transport: str, port: int, index: int) -> None:
    os.environ["NCCL_HOSTID"] = f"engine-{index}"
    torch.set_num_threads(1)
    if transport == "nccl":
        torch.cuda.set_device(0)
    receiver = Receiver(transport)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, receiver.get(self.path))

        def do_POST(self) -> None:
            if transport == "nccl":
                torch.cuda.set_device(0)  # every request has a thread of its own
            body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
            try:
                receiver.post(self.path.partition("?")[0], body)
            except Exception as error:
                self.answer(500, {"error": str(error)})
            else:
                self.answer(200, {})

        def answer(self, status: int, body: dict[str, Any]) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None: ...

    ThreadingHTTPServer((HOST, port), Handler).serve_forever()


def ask(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(url, data, timeout=120) as response:
        return dict(json.load(response))


@contextmanager
def engines(transport: str, count: int) -> Iterator[list[str]]:
    spawning = multiprocessing.get_context("spawn")
    ports = [free_port() for _ in range(count)]
    processes = [
        spawning.Process(target=serve, args=(transport, port, index), daemon=True)
        for index, port in enumerate(ports)
    ]
    for process in processes:
        process.start()
    urls = [f"http://{HOST}:{port}" for port in ports]
    try:
        for url in urls:
            wait_until_up(url)
        yield urls
    finally:
        for process in processes:
            process.kill()
            process.join()


def wait_until_up(url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            ask(url + "/weight_info")
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"{url} did not start")


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def build_model(transport: str) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**SHAPES[transport], tie_word_embeddings=True, dtype="bfloat16")
    with torch.device(DEVICES[transport]):
        return Qwen2ForCausalLM(config).to(torch.bfloat16)


def change(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)


def check(url: str, model: Any) -> None:
    stored = ask(url + "/check")["check"]
    ours = {name: checksum(each) for name, each in model.named_parameters()}
    wrong = [name for name in ours if stored.get(name) != ours[name]]
    assert not wrong, f"{len(wrong)} weights of the engine differ from the trainer's: {wrong[:3]} …"


def sync(weights: EngineFleet, model: Any, number: int) -> tuple[SyncReport, float]:
    change(model)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    report = weights.sync(Version(1, number))
    seconds = time.perf_counter() - started
    assert report.is_complete, report
    return report, seconds


def compare(transport: str, model: Any, buffers: list[int]) -> None:
    source = ModuleSource(model)
    size = total_bytes(source)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"\nweights: {count / 1e6:.0f} M parameters, {size / 1e6:.0f} MB, {transport}, best of {ROUNDS}"
    )
    with engines(transport, 1) as (url,):
        port = free_port()
        thread = threading.Thread(target=ask, args=(url + "/bare", {"bytes": size, "port": port}))
        thread.start()
        limit = min(broadcast(transport, 0, torch.device(DEVICES[transport]), size, port)[1:])
        thread.join()
        print(f"  {'':<32} {'seconds':>8} {'GB/s':>6} {'of bare':>8}  phases (ms)")
        print(
            f"  {'bare broadcast, one buffer':<32} {limit:>8.3f} {size / limit / 1e9:>6.2f} {1:>8.2f}"
        )
        number = 0
        for buffer in buffers:
            settings = WeightsSettings(
                engines=(url,), weights_transport=transport, weights_buffer_bytes=buffer * 2**20
            )
            weights = EngineFleet(settings, source)
            rounds = []
            for _ in range(ROUNDS):
                number += 1
                rounds.append(sync(weights, model, number))
            check(url, model)
            weights.close()
            report, best = min(rounds[1:], key=lambda each: each[1])
            phases = " ".join(f"{name} {took * 1e3:.0f}" for name, took in report.seconds.items())
            phases += f" (the first, with join: {rounds[0][1]:.2f} s)"
            show(f"sync, buffers of {buffer} MiB", size, best, limit, phases)
    print("  of bare: time relative to the bare broadcast; target: at most 1.5")


def show(name: str, size: int, seconds: float, limit: float, phases: str) -> None:
    rate = size / seconds / 1e9
    print(
        f"  {name:<32} {seconds:>8.3f} {rate:>6.2f} {seconds / limit:>8.2f}  {phases}", flush=True
    )


def kill(transport: str, model: Any) -> None:
    """Measures how long the other engine waits when one is killed during a transfer."""
    with engines(transport, 2) as urls:
        settings = WeightsSettings(
            engines=tuple(urls), weights_transport=transport, weights_buffer_bytes=2**26
        )
        weights = EngineFleet(settings, ModuleSource(model))
        _, usual = sync(weights, model, 1)
        _, usual = sync(weights, model, 2)
        ask(urls[1] + "/die", {})
        report, took = sync(weights, model, 3)
        assert report.engines == (urls[0],), report
        check(urls[0], model)
        print(
            f"\none of two engines killed during the transfer: the other was done after {took:.2f} s"
        )
        print(
            f"  (undisturbed {usual:.2f} s); {report.failures[0].phase}: {report.failures[0].reason}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--buffers", type=int, nargs="+", default=[64, 256, 1024], help="in MiB")
    parser.add_argument("--kill", action="store_true", help="also kill an engine")
    options = parser.parse_args()
    os.environ["NCCL_HOSTID"] = "trainer"
    model = build_model(options.transport)
    compare(options.transport, model, options.buffers)
    if options.kill:
        kill(options.transport, model)


if __name__ == "__main__":
    main()
