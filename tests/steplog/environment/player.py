"""An engine that plays the environments of examples/: sometimes well, sometimes badly.

It is the gateway's stub engine with answers that follow from the prompt. Which prompts it plays badly
is drawn from a fixed seed, so every group has some of both.
"""

import argparse
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvicorn

from tests import processes
from tests.gateway import stub_engine
from tests.gateway.client import call
from tests.gateway.stub_engine import HOST, MODEL, Answer, Stub, StubEngine
from tests.gateway.stub_parsers import text_of
from tests.tiny_model import EOS, IDS

CODE = {
    "add": "return a + b",
    "reverse": "return text[::-1]",
    "count": "return text.count(letter)",
    "largest": "return max(numbers, default=None)",
}


class PlayingStub(Stub):
    def __init__(self, delay: float) -> None:
        super().__init__(MODEL, tokens=8)
        self._delay = delay
        self._chance = random.Random(5)

    def _next(self, asked: stub_engine._Asked) -> Answer:
        if self._script:
            return self._script.popleft()
        prompt = text_of(msgspec.json.decode(asked.token_ids, type=list[int]))
        return Answer([*ids_of(self._play(prompt)), EOS], delay=self._delay)

    def _play(self, prompt: str) -> str:
        well = self._chance.random() < 0.6
        if result := re.search(r"<tool_response>\n(.*)\n</tool_response>", prompt):
            return f"It is {result[1]}."
        if sum_ := re.search(r"What is (.+?)\?", prompt):
            return call("calculate", f'{{"expression": "{sum_[1]}"}}') if well else "It is 12."
        if game := re.search(r"from 1 to (\d+)", prompt):
            return str(self._guess(prompt, int(game[1]), well))
        if task := re.search(r"function (\w+)\((.*?)\)", prompt):
            body = CODE[task[1]] if well else "return 0"
            return f"```python\ndef {task[1]}({task[2]}):\n    {body}\n```"
        return "well" if well else "badly"

    def _guess(self, prompt: str, highest: int, well: bool) -> int:
        low, high = 1, highest
        for said, hint in re.findall(r"assistant\n(\d+)<.*?>\n<.*?>user\n(Higher|Lower)", prompt):
            low, high = (int(said) + 1, high) if hint == "Higher" else (low, int(said) - 1)
        return (low + high) // 2 if well else low


def ids_of(text: str) -> list[int]:
    """Markers are single ids, as a model would say them."""
    parts = re.split(f"({'|'.join(map(re.escape, IDS))})", text)
    return [number for part in parts for number in ([IDS[part]] if part in IDS else part.encode())]


@contextmanager
def running_player(delay: float = 0.0) -> Iterator[StubEngine]:
    """Every call takes `delay` seconds."""
    from tests.conftest import free_port

    port = free_port()
    command = [sys.executable, "-m", "tests.steplog.environment.player", "--port", str(port)]
    root = Path(__file__).parents[3]
    process = processes.Popen([*command, "--delay", str(delay)], cwd=root)
    engine = StubEngine(port, process)
    try:
        stub_engine._wait_until_up(engine)
        yield engine
    finally:
        engine.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, required=True)
    options = parser.parse_args()
    uvicorn.run(
        PlayingStub(options.delay),
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
