"""`steplog train`: runs the trainer, as one process or as several ranks started by `torchrun`."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from socket import socket
from typing import Any

import torch

from pool import topics
from servicekit import tracing
from servicekit.errors import Fatal
from servicekit.masking import mask_settings
from servicekit.process import listen, start_logging, stop_on_signals
from servicekit.tokenizer import TokenizerFolder
from trainer import http
from trainer.algorithm.settings import LossSettings
from trainer.checkpoints.folder import Checkpoints
from trainer.data.batch import AgeLimits
from trainer.decisions.decider import Decider
from trainer.decisions.judge import Judge
from trainer.decisions.live_decider import LiveDecider
from trainer.decisions.maker import DecisionMaker
from trainer.incarnation.base import Incarnation
from trainer.incarnation.live import LiveIncarnation, wait_until_alone
from trainer.learner import Learner
from trainer.loop import TrainingLoop
from trainer.model.settings import ExecutionSettings, LearnerSettings
from trainer.model.sharding import Ranks, join, leave
from trainer.offline.decider import OfflineDecider
from trainer.offline.incarnation import OfflineIncarnation, lock_run
from trainer.offline.run_definition import check_not_offline, define_run
from trainer.offline.summary import OfflineSummary
from trainer.order_loop import execute_orders
from trainer.pack_limit import PackLimit
from trainer.preparation import BatchPreparation
from trainer.progress.reporter import ProgressReporter, open_reporter
from trainer.rank_orders import RankOrders
from trainer.recorded_settings import RecordedSettings, encode_settings
from trainer.settings import TrainSettings, section
from trainer.training import DecisionTraining
from trainer.weights.fleet import EngineFleet
from trainer.weights.ranks import RankGroup, SingleRank
from trainer.weights.settings import WeightsSettings

log = logging.getLogger(__name__)

Probe = Callable[[str], None]


def no_probe(stage: str) -> None:
    """Does nothing; only tests probe."""


def serve(settings: TrainSettings, probe: Probe = no_probe) -> str | None:
    """Runs until SIGTERM or Ctrl-C, until the last requested version is live, or until the range of an
    offline run ends; an offline run returns its summary. Raises Fatal with one sentence when it cannot
    run. `probe` is called at each stage; tests kill the process there."""
    if not (settings.model / "config.json").is_file():
        raise Fatal(f"model {settings.model} is not a Hugging Face folder: it has no config.json")
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    summary = _run_rank(settings, join(), probe)
    leave()
    return summary


def _run_rank(settings: TrainSettings, ranks: Ranks, probe: Probe) -> str | None:
    orders = RankOrders(ranks)
    if ranks.rank > 0:
        _run_other_rank(settings, orders)
        return None
    topics.check_rewarded_topic(topics.check(settings), settings, settings.topic)
    if settings.offline:
        return _run_offline(settings, orders, probe)
    _run_live(settings, orders, probe)
    return None


def _run_live(settings: TrainSettings, orders: RankOrders, probe: Probe) -> None:
    check_not_offline(settings, settings.run)
    start_logging("train", settings)
    stop = stop_on_signals()

    def is_stopped() -> bool:
        orders.send("wait")  # the other ranks would time out
        return stop.is_set()

    wait_until_alone(settings, settings.consumer_group, is_stopped)
    if stop.is_set():
        orders.send("stop")
        return
    with _open_reporting(settings, settings.port) as (listener, progress):
        incarnation = LiveIncarnation(
            settings,
            settings.run,
            settings.consumer_group,
            settings.topic,
            settings.group_rules(),
            settings.waiting_groups,
            probe,
            settings.accept_loss,
            settings.groups_per_batch,
            settings.keep_kv,
        )
        judge = Judge(settings, incarnation.marks, section(settings, LossSettings))
        decider = LiveDecider(incarnation, settings, judge, _recorded_fields(settings), probe)
        _train(settings, incarnation, decider, orders, listener, progress, stop, probe)


def _run_offline(settings: TrainSettings, orders: RankOrders, probe: Probe) -> str:
    tokenizer = TokenizerFolder(str(settings.model))
    definition = define_run(settings, tokenizer)
    start_logging("train", settings)
    stop, started = stop_on_signals(), time.monotonic()
    # The default port may be taken by a live trainer.
    port = settings.port if "port" in settings.model_fields_set else 0
    with (
        lock_run(settings.checkpoints, settings.run),
        _open_reporting(settings, port) as (listener, progress),
    ):
        incarnation = OfflineIncarnation(settings, definition, tokenizer, probe)
        judge = Judge(settings, incarnation.marks, section(settings, LossSettings), any_age=True)
        decisions = DecisionMaker(incarnation, settings, judge, _recorded_fields(settings))
        decider = OfflineDecider(incarnation, decisions, probe)
        _train(settings, incarnation, decider, orders, listener, progress, stop, probe)
    seconds = time.monotonic() - started
    summary = OfflineSummary(settings, settings.run)
    return summary.format(settings.run, settings.checkpoints, decider.range_progress(), seconds)


@contextmanager
def _open_reporting(
    settings: TrainSettings, port: int
) -> Iterator[tuple[socket, ProgressReporter]]:
    """Opens the socket of the status page, and the view and trackers that progress is reported to."""
    with (
        listen(settings.host, port) as listener,
        open_reporter(
            settings.run,
            trackers=settings.trackers,
            folder=settings.tracker_dir,
            config=mask_settings(settings),
        ) as progress,
    ):
        yield listener, progress


def _train(
    settings: TrainSettings,
    incarnation: Incarnation,
    decider: Decider,
    orders: RankOrders,
    listener: socket,
    progress: ProgressReporter,
    stop: threading.Event,
    probe: Probe,
) -> None:
    with ExitStack() as stack:
        orders.send("begin", str(incarnation.number).encode())
        pack_limit = _make_pack_limit(settings)
        training = _make_training(settings, pack_limit, probe, incarnation.number)
        preparation = _make_preparation(settings, training, probe)
        stack.callback(preparation.close)
        fleet = _make_fleet(settings, training.learner)
        stack.callback(fleet.close)
        stack.callback(decider.close)
        http.serve(listener, lambda: max(decider.last_progress, progress.last_change))
        decider.start()
        loop = TrainingLoop(
            settings,
            incarnation,
            decider,
            training,
            preparation,
            fleet,
            orders,
            progress,
            stop,
            probe,
        )
        with pack_limit.keep_for_next_start():
            loop.run()


def _run_other_rank(settings: TrainSettings, orders: RankOrders) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while (order := orders.receive()).kind == "wait":
        pass
    if order.kind == "begin":
        tracing.start("train", settings.traces)
        pack_limit = _make_pack_limit(settings)
        training = _make_training(settings, pack_limit, no_probe, int(order.content))
        preparation = _make_preparation(settings, training, no_probe)
        fleet = _make_fleet(settings, training.learner)
        with pack_limit.keep_for_next_start():
            execute_orders(orders, training, preparation, fleet, settings.codec())
        preparation.close()


def _make_pack_limit(settings: TrainSettings) -> PackLimit:
    return PackLimit(settings.checkpoints / settings.run, section(settings, ExecutionSettings))


def _make_training(
    settings: TrainSettings, pack_limit: PackLimit, probe: Probe, incarnation: int
) -> DecisionTraining:
    loss_settings = section(settings, LossSettings)
    learner_settings = section(settings, LearnerSettings)
    torch.manual_seed(settings.seed)
    execution = pack_limit.apply(Ranks())
    learner = Learner.from_folder(settings.model, learner_settings, loss_settings, execution)
    checkpoints = Checkpoints(
        settings.checkpoints, settings.run, settings.keep_checkpoints, settings.keep_every, probe
    )
    description = {
        "run": settings.run,
        "model": str(settings.model),
        "loss": loss_settings.model_dump(mode="json"),
        "learner": learner_settings.model_dump(mode="json"),
    }
    training = DecisionTraining(settings, learner, checkpoints, description, probe, incarnation)
    training.restore()
    return training


def _make_preparation(
    settings: TrainSettings, training: DecisionTraining, probe: Probe
) -> BatchPreparation:
    return BatchPreparation(training.prepare, training.learner.ranks, settings.codec(), probe)


def _make_fleet(settings: TrainSettings, learner: Learner) -> EngineFleet:
    dtype = getattr(torch, settings.weights_dtype) if settings.weights_dtype else learner.dtype
    ranks = RankGroup() if learner.ranks.world > 1 else SingleRank()
    return EngineFleet(
        section(settings, WeightsSettings),
        learner.weights(dtype),
        ranks=ranks,
        adapters=learner.adapters(),
    )


def _recorded_fields(settings: TrainSettings) -> Callable[[int], dict[str, Any]]:
    """The function that returns, for a sequence number, the fields of a Decision about its training."""
    limits = AgeLimits(settings.run, settings.max_age, settings.stale_tokens == "mask")
    recorded = RecordedSettings(
        section(settings, LossSettings), section(settings, LearnerSettings), limits
    )
    encoded = encode_settings(recorded)
    return lambda sequence: {"settings": encoded, "seed": settings.seed + sequence}
