"""`steplog reward`: the reward worker as a process, with its HTTP server."""

import logging

from pool import topics
from reward import tags
from reward.scoring.loading import load_all
from reward.scoring.scorer import Scorer
from reward.scoring.text import check_tokenizer
from reward.settings import RewardSettings
from reward.worker.http import make_app
from reward.worker.worker import RewardWorker
from servicekit.process import listen, start_logging, stop_on_signals
from servicekit.status import make_status_server

log = logging.getLogger(__name__)


def serve(settings: RewardSettings) -> None:
    """Runs until SIGTERM or Ctrl-C; raises Fatal with a one-line message when it cannot."""
    functions = load_all(settings.function)
    check_tokenizer(settings.tokenizer)
    topics.check(settings)
    group = settings.group or tags.live_group(settings.into)
    if settings.into is not None:
        tags.open_live(settings, settings.into, group, functions)
    listener = listen(settings.host, settings.port)
    start_logging("reward", settings)
    stop = stop_on_signals()
    scorer = Scorer(settings.function, functions, settings.tokenizer, settings.processes)
    try:
        worker = RewardWorker(
            settings,
            group,
            settings.slot,
            scorer,
            settings.at_once,
            settings.channels,
            into=settings.into,
        )
        app = make_app(scorer, bool(functions), lambda: worker.last_progress)
        scorer.async_functions.start(make_status_server(app).serve(sockets=[listener]))
        names = ", ".join(function.identity for function in functions)
        log.info(
            "scoring channels %s with %s",
            ", ".join(settings.channels),
            names or "the rewards that agents give",
        )
        worker.run(stop)
    finally:
        scorer.close()
        listener.close()
