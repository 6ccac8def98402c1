"""The reward worker as a process."""

import logging

import uvicorn

from pool import topics
from pool.process import listen, start_logging, stopped_by_signals
from reward.function import load_all
from reward.http import make_app
from reward.settings import RewardSettings
from reward.texts import check_tokenizer
from reward.worker import Scorer, Worker

log = logging.getLogger(__name__)


def serve(settings: RewardSettings) -> None:
    """Runs until SIGTERM or Ctrl-C; raises Fatal with one sentence when it cannot."""
    functions = load_all(settings.function)
    check_tokenizer(settings.tokenizer)
    topics.check(settings)
    listener = listen(settings.host, settings.port)
    start_logging("reward", settings)
    stop = stopped_by_signals()
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
