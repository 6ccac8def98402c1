"""The reward worker as a process."""

import logging

from pool import topics
from reward import tags
from reward.function import load_all
from reward.http import make_app
from reward.settings import RewardSettings
from reward.texts import check_tokenizer
from reward.worker import Scorer, Worker
from servicekit.process import listen, start_logging, stopped_by_signals
from servicekit.status import make_status_server

log = logging.getLogger(__name__)


def serve(settings: RewardSettings) -> None:
    """Runs until SIGTERM or Ctrl-C; raises Fatal with one sentence when it cannot."""
    functions = load_all(settings.function)
    check_tokenizer(settings.tokenizer)
    topics.check(settings)
    group = settings.group or tags.live_group(settings.into)
    if settings.into is not None:
        tags.open_live(settings, settings.into, group, functions)
    listener = listen(settings.host, settings.port)
    start_logging("reward", settings)
    stop = stopped_by_signals()
    scorer = Scorer(settings.function, functions, settings.tokenizer, settings.processes)
    try:
        worker = Worker(
            settings, group, settings.slot, scorer, settings.at_once, into=settings.into
        )
        app = make_app(scorer, bool(functions), lambda: worker.last_progress)
        scorer.remote.start(make_status_server(app).serve(sockets=[listener]))
        named = ", ".join(function.described for function in functions)
        log.info("scoring with %s", named or "what agents say")
        worker.run(stop)
    finally:
        scorer.close()
        listener.close()
