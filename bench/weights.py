"""New weights on their way to engines, beside a bare broadcast of the same bytes in the same processes.

    python -m bench.weights                    gloo on CPUs, a small model
    python -m bench.weights --transport nccl   a Qwen2 of 0.5e9 parameters; needs a GPU
    … --kill                                   also: one of two engines dies in the middle

The sending side is the trainer's own, `EngineFleet.sync`, with all phases over HTTP. An engine is a
process that answers vLLM's control routes and receives with what runs in vLLM's workers; only the model
behind it is plain: it copies what comes. With NCCL all share one GPU: each process claims a host of its
own, so that the bytes go over sockets, in both of the compared. Without vLLM: see `bench.carry`.
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

from pool.core.versions import Version
from trainer.weights.fleet import EngineFleet
from trainer.weights.settings import WeightsSettings
from trainer.weights.source import ModuleSource, total_bytes
from trainer.weights.sync import SyncReport

HOST = "127.0.0.1"
ROUNDS = 7
SHAPES = {
    "nccl": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
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
    """One engine: vLLM's routes, and its receiving side around a plain model."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.device = (
            torch.device(DEVICES[transport], 0) if transport == "nccl" else torch.device("cpu")
        )
        self.label = "default"
        self.paused = False
        self.die = False
        self.held: dict[str, torch.Tensor] = {}
        self.engine = self.made()

    def made(self) -> Any:
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config = SimpleNamespace(parallel_config=parallel, model_config=None)
        model = SimpleNamespace(load_weights=self.load, modules=lambda: ())
        from trainer.weights.worker import GlooEngine, NcclEngine

        kind = {"nccl": NcclEngine, "gloo": GlooEngine}[self.transport]
        return kind(None, config, self.device, model)

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name in self.held:
                self.held[name].copy_(tensor)
            else:
                self.held[name] = tensor.clone()
        if self.die:
            os.kill(os.getpid(), 9)

    def get(self, path: str) -> dict[str, Any]:
        if path == "/check":
            return {"check": {name: checksum(each) for name, each in self.held.items()}}
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
            bare(self.transport, 1, self.device, body["bytes"], body["port"])


def checksum(tensor: torch.Tensor) -> int:
    return int(tensor.detach().contiguous().view(-1).view(torch.uint8).to(torch.int64).sum().item())


def bare(transport: str, rank: int, device: torch.device, size: int, port: int) -> list[float]:
    """Seconds of each broadcast of so many bytes, with torch's own process group."""
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


def serve(transport: str, port: int, place: int) -> None:
    os.environ["NCCL_HOSTID"] = f"engine-{place}"
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
        spawning.Process(target=serve, args=(transport, port, place), daemon=True)
        for place, port in enumerate(ports)
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


def model_of(transport: str) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**SHAPES[transport], tie_word_embeddings=True, dtype="bfloat16")
    with torch.device(DEVICES[transport]):
        return Qwen2ForCausalLM(config).to(torch.bfloat16)


def change(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)


def check(url: str, model: Any) -> None:
    held = ask(url + "/check")["check"]
    ours = {name: checksum(each) for name, each in model.named_parameters()}
    wrong = [name for name in ours if held.get(name) != ours[name]]
    assert not wrong, (
        f"the engine has other weights than the trainer: {len(wrong)}, first {wrong[:3]}"
    )


def synced(weights: EngineFleet, model: Any, number: int) -> tuple[SyncReport, float]:
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
        limit = min(bare(transport, 0, torch.device(DEVICES[transport]), size, port)[1:])
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
                rounds.append(synced(weights, model, number))
            check(url, model)
            weights.close()
            report, best = min(rounds[1:], key=lambda each: each[1])
            phases = " ".join(f"{name} {took * 1e3:.0f}" for name, took in report.seconds.items())
            phases += f" (the first, with join: {rounds[0][1]:.2f} s)"
            show(f"sync, buffers of {buffer} MiB", size, best, limit, phases)
    print("  of bare: how many times the bare broadcast's time; the goal is 1.5 at most")


def show(name: str, size: int, seconds: float, limit: float, phases: str) -> None:
    rate = size / seconds / 1e9
    print(
        f"  {name:<32} {seconds:>8.3f} {rate:>6.2f} {seconds / limit:>8.2f}  {phases}", flush=True
    )


def kill(transport: str, model: Any) -> None:
    """What the others wait for when one dies."""
    with engines(transport, 2) as urls:
        settings = WeightsSettings(
            engines=tuple(urls), weights_transport=transport, weights_buffer_bytes=2**26
        )
        weights = EngineFleet(settings, ModuleSource(model))
        _, usual = synced(weights, model, 1)
        _, usual = synced(weights, model, 2)
        ask(urls[1] + "/die", {})
        report, took = synced(weights, model, 3)
        assert report.engines == (urls[0],), report
        check(urls[0], model)
        print(
            f"\none of two engines killed in the middle: the other has the version after {took:.2f} s"
        )
        print(
            f"  (undisturbed {usual:.2f} s); {report.failures[0].phase}: {report.failures[0].reason}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--buffers", type=int, nargs="+", default=[64, 256, 1024], help="in MiB")
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    os.environ["NCCL_HOSTID"] = "trainer"
    model = model_of(options.transport)
    compare(options.transport, model, options.buffers)
    if options.kill:
        kill(options.transport, model)


if __name__ == "__main__":
    main()
