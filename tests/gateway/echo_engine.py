"""A stub engine whose answers tell which prompt they answer, and that fails now and then.

An answer is `HASH.NONCE`: a hash of the prompt's ids, and a number that no other generation has. So
a test sees whether a Step's prompt and response belong together, and whether an agent was told what
the log has. Delays and faults are drawn by chance.
"""

import argparse
import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

import msgspec
import uvicorn

from tests import processes
from tests.gateway import stub_engine
from tests.gateway.stub_engine import HOST, MODEL, Answer, Stub, StubEngine
from tests.tiny_model import EOS

FAULTS = ("before", "status:500", "error", "garbage", "cut", "logprob_count")
HASH_DIGITS = 12


def echo_of(prompt: Sequence[int]) -> str:
    """What an answer to this prompt begins with."""
    return hashlib.sha256(repr(list(prompt)).encode()).hexdigest()[:HASH_DIGITS]


class EchoStub(Stub):
    def __init__(self, delay: float, faults: float) -> None:
        super().__init__(MODEL, tokens=8)
        self._delay = delay
        self._faults = faults

    def _next(self, asked: stub_engine._Asked) -> Answer:
        prompt = msgspec.json.decode(asked.token_ids, type=list[int])
        text = f"{echo_of(prompt)}.{token_hex(4)}"
        fault = random.choice(FAULTS) if random.random() < self._faults else ""
        pause = random.uniform(0, self._delay)
        return Answer([*text.encode(), EOS], fault=fault, delay=pause / 2, chunk_delay=pause / 50)


@contextmanager
def running_echo(delay: float = 0.0, faults: float = 0.0, port: int = 0) -> Iterator[StubEngine]:
    """A call takes up to `delay` seconds, and a share `faults` of all calls fails."""
    from tests.conftest import free_port

    port = port or free_port()
    command = [sys.executable, "-m", "tests.gateway.echo_engine", "--port", str(port)]
    command += ["--delay", str(delay), "--faults", str(faults)]
    engine = StubEngine(port, processes.Popen(command, cwd=Path(__file__).parents[2]))
    try:
        stub_engine._wait_until_up(engine)
        yield engine
    finally:
        engine.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, required=True)
    parser.add_argument("--faults", type=float, required=True)
    options = parser.parse_args()
    uvicorn.run(
        EchoStub(options.delay, options.faults),
        host=HOST,
        port=options.port,
        loop="uvloop",
        http=stub_engine._Protocol,
        lifespan="off",
        log_level="error",
        access_log=False,
    )


if __name__ == "__main__":
    main()
