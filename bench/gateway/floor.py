"""A minimal recording proxy: the floor with which the gateway is compared.

It takes a call, calls the engine, writes the answer to Kafka, awaits the acknowledgement and answers.
Raw ASGI, aiohttp, orjson; no template, no trajectories, no schema, one engine. Without --tokenizer it
sends the engine a fixed prompt.

    python -m bench.gateway.floor --engine URL --bootstrap HOST:PORT --topic NAME --port PORT
        [--tokenizer FILE]
"""

import argparse
import asyncio
from array import array
from typing import Any

import aiohttp
import orjson
import uvicorn
from confluent_kafka import Producer
from tokenizers import Tokenizer

PROMPT = list(range(512))
JSON = [(b"content-type", b"application/json")]


class Floor:
    def __init__(self, engine: str, bootstrap: str, topic: str, tokenizer: str | None) -> None:
        self._tokenizer = Tokenizer.from_file(tokenizer) if tokenizer else None
        self._engine = engine + "/inference/v1/generate"
        self._topic = topic
        self._bootstrap = bootstrap
        self._session: aiohttp.ClientSession | None = None
        self._pending = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._session is None:
            self._start()
        message = await receive()
        body = message["body"]
        while message.get("more_body"):
            message = await receive()
            body += message["body"]
        prompt = self._prompt(orjson.loads(body or b"{}"))
        answer = await self._generate(prompt)
        choice = answer["choices"][0]
        await self._record(scope["path"], prompt, choice)
        text = bytes(i for i in choice["token_ids"] if i < 128).decode()
        completion = {
            "object": "chat.completion",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}],
        }
        await send({"type": "http.response.start", "status": 200, "headers": JSON})
        await send({"type": "http.response.body", "body": orjson.dumps(completion)})

    def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._producer = Producer(
            {
                "bootstrap.servers": self._bootstrap,
                "enable.idempotence": True,
                "compression.type": "zstd",
                "linger.ms": 2,
            }
        )

    def _prompt(self, request: Any) -> list[int]:
        if self._tokenizer is None or "messages" not in request:
            return PROMPT
        ids: list[int] = self._tokenizer.encode(request["messages"][0]["content"]).ids
        return ids

    async def _generate(self, prompt: list[int]) -> Any:
        assert self._session is not None
        sampling = {"logprobs": 0, "max_tokens": 128}
        body = orjson.dumps({"token_ids": prompt, "sampling_params": sampling})
        headers = {"content-type": "application/json"}
        async with self._session.post(self._engine, data=body, headers=headers) as response:
            return orjson.loads(await response.read())

    async def _record(self, key: str, prompt: list[int], choice: Any) -> None:
        value = array("i", prompt).tobytes() + array("i", choice["token_ids"]).tobytes()
        value += array("f", (entry["logprob"] for entry in choice["logprobs"]["content"])).tobytes()
        acknowledged: asyncio.Future[None] = self._loop.create_future()

        def delivered(error: object, _: object) -> None:
            assert error is None
            self._pending -= 1
            acknowledged.set_result(None)

        self._producer.produce(self._topic, value, key, on_delivery=delivered)
        self._pending += 1
        if self._pending == 1:
            self._loop.call_later(0.001, self._poll)
        await acknowledged

    def _poll(self) -> None:
        """In the event loop, as pool.Producer does: a thread of its own costs more."""
        self._producer.poll(0)
        if self._pending:
            self._loop.call_later(0.001, self._poll)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--engine", "--bootstrap", "--topic"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokenizer")
    given = parser.parse_args()
    uvicorn.run(
        Floor(given.engine, given.bootstrap, given.topic, given.tokenizer),
        port=given.port,
        http="httptools",
        loop="uvloop",
        lifespan="off",
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main()
