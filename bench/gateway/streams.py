"""Thousands of streams at once, held open by one gateway process."""

import asyncio

import msgspec
import psutil

from bench.gateway.load import Sent, connect


def hold_streams(url: str, process: psutil.Process, count: int, text: str) -> None:
    print(f"\n{count:,} concurrent streams in one process")
    idle = process.memory_info().rss
    peak = asyncio.run(_hold(url, process, count, text))
    print(f"  resident: {idle / 2**20:.0f} MiB before, {peak / 2**20:.0f} MiB at the peak")
    print("  wanted: under 1,024 MiB")


async def _hold(url: str, process: psutil.Process, count: int, text: str) -> int:
    """All are open at the same time, since the engine takes its time between tokens."""
    streams = asyncio.gather(*(_stream(url, at, text) for at in range(count)))
    peak = 0
    while not streams.done():
        peak = max(peak, process.memory_info().rss)
        await asyncio.sleep(0.1)
    whole = await streams
    assert all(body.endswith(b"data: [DONE]\n\n") for body in whole)
    return peak


async def _stream(url: str, at: int, text: str) -> bytes:
    messages = [{"role": "user", "content": f"{at} {text}"}]
    body = {"model": "", "messages": messages, "stream": True}
    connection = await connect(url)
    path = f"/stream-{at}/streams-{at // 8}/v1/chat/completions"
    answer = await connection.call(Sent(path, msgspec.json.encode(body)))
    connection.close()
    return answer
