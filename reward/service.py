"""The reward worker as a process."""

import logging
import signal
import socket
import threading
from types import FrameType

import uvicorn

from pool import topics
from pool.errors import Fatal
from reward.function import load_all
from reward.http import make_app
from reward.settings import RewardSettings
from reward.texts import check_tokenizer
from reward.worker import Scorer, Worker

log = logging.getLogger(__name__)


def serve(settings: RewardSettings) -> None:
    """Runs until SIGTERM or Ctrl-C; raises Fatal with one sentence when it cannot."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    functions = load_all(settings.function)
    check_tokenizer(settings.tokenizer)
    topics.check(settings)
    listener = _listen(settings)
    stop = _stopped_by_signals()
    scorer = Scorer(settings.function, functions, settings.tokenizer, settings.processes)
    try:
        worker = Worker(settings, settings.group, settings.slot, scorer, settings.at_once)
        app = make_app(scorer, bool(functions), lambda: worker.last_progress)
        server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
        )
        scorer.remote.start(server.serve(sockets=[listener]))
        named = ", ".join(f"{f.name} {f.version} ×{f.weight:g}" for f in functions)
        log.info("scoring with %s", named or "what agents say")
        worker.run(stop)
    finally:
        scorer.close()
        listener.close()


def _listen(settings: RewardSettings) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise Fatal(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
            "choose another --port"
        ) from error
    return listener


def _stopped_by_signals() -> threading.Event:
    """The round that is under way is finished and committed first."""
    stop = threading.Event()

    def ask(number: int, _: FrameType | None) -> None:
        log.info("stopping on %s", signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    return stop
