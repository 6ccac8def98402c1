"""`steplog lag`: how far every group is behind, once or again and again."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from console.look import Look
from console.observer import open_observer
from console.screen import Screen
from console.settings import LagSettings
from servicekit.command_line import print_line
from servicekit.errors import BrokerUnavailable

Show = Callable[[Look, str], None]
"""Takes a look, and why it is not a fresh one."""


def lag(settings: LagSettings, say: Callable[[str], None] = print_line) -> None:
    for client in ("aiokafka", "librdkafka"):  # their lines would fall into the picture
        logging.getLogger(client).setLevel(logging.CRITICAL)
    asyncio.run(_lag(settings, say))


async def _lag(settings: LagSettings, say: Callable[[str], None]) -> None:
    console = Console(highlight=False)
    if settings.json_:
        await _show(settings, lambda look, trouble: None if trouble else say(as_json(look)))
    elif settings.watch and console.is_terminal:
        await _draw(settings, console)
    else:
        await _show(settings, lambda look, trouble: console.print(_screen(settings, look, trouble)))


async def _draw(settings: LagSettings, console: Console) -> None:
    asking = Text(f"asking {settings.bootstrap} …", "dim")
    with Live(asking, console=console, screen=True, auto_refresh=False) as live:
        await _show(
            settings,
            lambda look, trouble: live.update(
                _screen(settings, look, trouble, console.height), refresh=True
            ),
        )


async def _show(settings: LagSettings, show: Show) -> None:
    async for look, trouble in looks(settings):
        show(look, trouble)


async def looks(settings: LagSettings) -> AsyncIterator[tuple[Look, str]]:
    """One, or without end. A broker that is there at first and goes away is waited for."""
    last: Look | None = None
    while True:
        try:
            async with open_observer(settings, work=settings.work) as observer:
                while True:
                    last = await observer.look()
                    yield last, ""
                    if not settings.watch:
                        return
                    await asyncio.sleep(settings.every_s)
        except BrokerUnavailable as error:
            if last is None:
                raise
            yield last, str(error)
            await asyncio.sleep(settings.every_s)


def as_json(look: Look) -> str:
    return msgspec.json.encode(look).decode()


def _screen(settings: LagSettings, look: Look, trouble: str, height: int | None = None) -> Screen:
    return Screen(look, all_=settings.all_, height=height, trouble=trouble)
