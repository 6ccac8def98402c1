"""Memory of one gateway process with thousands of concurrent streams."""

import asyncio

import msgspec
import psutil

from bench.gateway.load import HttpRequest, connect


def hold_streams(url: str, process: psutil.Process, count: int, text: str) -> None:
    print(f"\n{count:,} concurrent streams in one process")
    idle = process.memory_info().rss
    peak = asyncio.run(_hold(url, process, count, text))
    print(f"  resident: {idle / 2**20:.0f} MiB before, {peak / 2**20:.0f} MiB at the peak")
    print("  target: under 1,024 MiB")


async def _hold(url: str, process: psutil.Process, count: int, text: str) -> int:
    """All streams are open at the same time, because the engine pauses between tokens. Returns the peak
    of resident memory."""
    streams = asyncio.gather(*(_stream(url, at, text) for at in range(count)))
    peak = 0
    while not streams.done():
        peak = max(peak, process.memory_info().rss)
        await asyncio.sleep(0.1)
    bodies = await streams
    assert all(body.endswith(b"data: [DONE]\n\n") for body in bodies)
    return peak


async def _stream(url: str, at: int, text: str) -> bytes:
    messages = [{"role": "user", "content": f"{at} {text}"}]
    body = {"model": "", "messages": messages, "stream": True}
    connection = await connect(url)
    path = f"/stream-{at}/streams-{at // 8}/v1/chat/completions"
    answer = await connection.call(HttpRequest(path, msgspec.json.encode(body)))
    connection.close()
    return answer
