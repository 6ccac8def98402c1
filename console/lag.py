"""`steplog lag`: how far every consumer group is behind, once or repeatedly."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from console.lag_view import LagView
from console.observer import open_observer
from console.settings import LagSettings
from console.snapshot import ClusterSnapshot
from servicekit.command_line import print_line
from servicekit.errors import BrokerUnavailable

Show = Callable[[ClusterSnapshot, str], None]
"""Takes a snapshot, and the reason why it could not be refreshed (or an empty text)."""


def lag(settings: LagSettings, say: Callable[[str], None] = print_line) -> None:
    for client in ("aiokafka", "librdkafka"):  # their log lines would garble the display
        logging.getLogger(client).setLevel(logging.CRITICAL)
    asyncio.run(_lag(settings, say))


async def _lag(settings: LagSettings, say: Callable[[str], None]) -> None:
    console = Console(highlight=False)
    if settings.json_:
        await _show(settings, lambda snapshot, error: None if error else say(as_json(snapshot)))
    elif settings.watch and console.is_terminal:
        await _draw(settings, console)
    else:
        await _show(
            settings, lambda snapshot, error: console.print(_view(settings, snapshot, error))
        )


async def _draw(settings: LagSettings, console: Console) -> None:
    connecting = Text(f"Connecting to {settings.bootstrap} …", "dim")
    with Live(connecting, console=console, screen=True, auto_refresh=False) as live:
        await _show(
            settings,
            lambda snapshot, error: live.update(
                _view(settings, snapshot, error, console.height), refresh=True
            ),
        )


async def _show(settings: LagSettings, show: Show) -> None:
    async for snapshot, error in take_snapshots(settings):
        show(snapshot, error)


async def take_snapshots(settings: LagSettings) -> AsyncIterator[tuple[ClusterSnapshot, str]]:
    """One snapshot, or with `--watch` an endless series. If the broker goes away after the first, its
    last snapshot is repeated with the error until it is back."""
    last: ClusterSnapshot | None = None
    while True:
        try:
            async with open_observer(settings, work=settings.work) as observer:
                while True:
                    last = await observer.observe()
                    yield last, ""
                    if not settings.watch:
                        return
                    await asyncio.sleep(settings.every_s)
        except BrokerUnavailable as error:
            if last is None:
                raise
            yield last, str(error)
            await asyncio.sleep(settings.every_s)


def as_json(snapshot: ClusterSnapshot) -> str:
    return msgspec.json.encode(snapshot).decode()


def _view(
    settings: LagSettings, snapshot: ClusterSnapshot, error: str, height: int | None = None
) -> LagView:
    return LagView(snapshot, all_=settings.all_, height=height, error=error)
