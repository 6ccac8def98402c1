"""What an environment with a bare config does, in a process of its own: asks each of its servers, says
how many samples it got, and has them probed until its input ends."""

import asyncio
import sys
from typing import Any

from atroposlib.envs.server_handling.server_manager import APIServerConfig, ServerManager

CALLS = 8
"""Two for each server: the one with most room is chosen."""
SAMPLES = 2


async def main(kind: str, tokenizer: str) -> None:
    bare = APIServerConfig(
        base_url="http://ignored:1/v1", server_type=kind, tokenizer_name=tokenizer
    )
    manager = ServerManager(bare)
    ask = _chat if kind == "openai" else _tokens
    got = await asyncio.gather(*(ask(manager, f"say {n}") for n in range(CALLS)))
    sys.stdout.write(f"{sum(got)}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


async def _chat(manager: Any, text: str) -> int:
    messages = [{"role": "user", "content": text}]
    answer = await manager.chat_completion(messages=messages, max_tokens=20, n=SAMPLES)
    return len(answer.choices)


async def _tokens(manager: Any, text: str) -> int:
    _, tokens, logprobs, _ = await manager.tokens_and_logprobs_completion(
        prompt=text, max_tokens=20, n=SAMPLES
    )
    assert [len(one) for one in tokens] == [len(one) for one in logprobs]
    return len(tokens)


asyncio.run(main(*sys.argv[1:]))
