"""The trainer as a process, or as several that `torchrun` starts."""

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
from pool.core.groups import Group
from pool.core.rows import build_rows
from pool.core.trajectories import Trajectory
from servicekit import tracing
from servicekit.errors import Fatal
from servicekit.masking import mask_settings
from servicekit.process import listen, start_logging, stop_on_signals
from servicekit.tokenizer import TokenizerFolder
from trainer import http
from trainer.algorithm.settings import LossSettings
from trainer.checkpoint import Checkpoints
from trainer.data.batch import Limits, reward_of
from trainer.data.decided import Decided, described
from trainer.deciding.decider import Decider
from trainer.deciding.decisions import Decisions
from trainer.deciding.judging import Judge
from trainer.deciding.thread import DecidingThread
from trainer.following import follow
from trainer.incarnation import Incarnation, wait_until_alone
from trainer.learner import Learner
from trainer.life import Life
from trainer.loop import Loop
from trainer.model.settings import LearnerSettings
from trainer.model.sharding import Ranks, join, leave
from trainer.offline.beginning import begin, check_live
from trainer.offline.decider import OfflineDecider
from trainer.offline.life import OfflineLife, alone
from trainer.offline.summary import Summary
from trainer.orders import Orders
from trainer.progress.status import Progress, open_progress
from trainer.settings import TrainSettings, part
from trainer.training import Training
from trainer.weights import lockstep
from trainer.weights.fleet import Weights
from trainer.weights.settings import WeightsSettings

log = logging.getLogger(__name__)

Probe = Callable[[str], None]


def serve(settings: TrainSettings, probe: Probe = lambda stage: None) -> str | None:
    """Runs until SIGTERM or Ctrl-C, until the last version that is wanted is live, or until the range
    ends of an offline run, which then tells what became of it. Raises Fatal with one sentence when it
    cannot. `probe` is told of each stage; tests kill there."""
    if not (settings.model / "config.json").is_file():
        raise Fatal(f"model {settings.model} is no Hugging Face folder: it has no config.json")
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    told = _serve(settings, join(), probe)
    leave()
    return told


def _serve(settings: TrainSettings, ranks: Ranks, probe: Probe) -> str | None:
    orders = Orders(ranks)
    if ranks.rank > 0:
        _follow(settings, orders)
        return None
    topics.check_rewarded_topic(topics.check(settings), settings, settings.topic)
    if settings.offline:
        return _lead_offline(settings, orders, probe)
    _lead(settings, orders, probe)
    return None


def _lead(settings: TrainSettings, orders: Orders, probe: Probe) -> None:
    check_live(settings, settings.run)
    start_logging("train", settings)
    stop = stop_on_signals()

    def is_stopped() -> bool:
        orders.give("wait")
        return stop.is_set()

    wait_until_alone(settings, settings.consumer_group, is_stopped)
    if stop.is_set():
        orders.give("stop")
        return
    with _shown(settings, settings.port) as (listener, progress):
        life = Incarnation(
            settings,
            settings.run,
            settings.consumer_group,
            settings.topic,
            settings.group_rules(),
            settings.waiting_groups,
            probe,
            settings.accept_loss,
        )
        judge = Judge(settings, life.marks, _reward(settings))
        decider = Decider(life, settings, judge, _describe(settings), probe)
        _train(settings, life, decider, orders, listener, progress, stop, probe)


def _lead_offline(settings: TrainSettings, orders: Orders, probe: Probe) -> str:
    tokenizer = TokenizerFolder(str(settings.model))
    beginning = begin(settings, tokenizer)
    start_logging("train", settings)
    stop, started = stop_on_signals(), time.monotonic()
    # A live trainer may have the usual port.
    port = settings.port if "port" in settings.model_fields_set else 0
    with alone(settings.checkpoints, settings.run), _shown(settings, port) as (listener, progress):
        life = OfflineLife(settings, beginning, tokenizer, probe)
        judge = Judge(settings, life.marks, _reward(settings), any_age=True)
        decisions = Decisions(life, settings, judge, _describe(settings))
        decider = OfflineDecider(life, decisions, probe)
        _train(settings, life, decider, orders, listener, progress, stop, probe)
    seconds = time.monotonic() - started
    summary = Summary(settings, settings.run)
    return summary.told(settings.run, settings.checkpoints, decider.read(), seconds)


@contextmanager
def _shown(settings: TrainSettings, port: int) -> Iterator[tuple[socket, Progress]]:
    """A place to ask how it is, and one to tell."""
    with (
        listen(settings.host, port) as listener,
        open_progress(
            settings.run,
            trackers=settings.trackers,
            folder=settings.tracker_dir,
            config=mask_settings(settings),
        ) as progress,
    ):
        yield listener, progress


def _train(
    settings: TrainSettings,
    life: Life,
    decider: DecidingThread,
    orders: Orders,
    listener: socket,
    progress: Progress,
    stop: threading.Event,
    probe: Probe,
) -> None:
    with ExitStack() as stack:
        orders.give("begin", str(life.number).encode())
        training = _training(settings, probe, life.number)
        weights = _weights(settings, training.learner)
        stack.callback(weights.close)
        stack.callback(decider.close)
        http.serve(listener, lambda: max(decider.last_progress, progress.last_change))
        decider.start()
        loop = Loop(settings, life, decider, training, weights, orders, progress, stop, probe)
        loop.run()


def _follow(settings: TrainSettings, orders: Orders) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while (order := orders.hear()).kind == "wait":
        pass
    if order.kind == "begin":
        tracing.start("train", settings.traces)
        training = _training(settings, lambda stage: None, int(order.content))
        follow(orders, training, _weights(settings, training.learner), settings.codec())


def _training(settings: TrainSettings, probe: Probe, incarnation: int) -> Training:
    loss, learning = part(settings, LossSettings), part(settings, LearnerSettings)
    torch.manual_seed(settings.seed)
    learner = Learner.from_folder(settings.model, learning, loss)
    checkpoints = Checkpoints(
        settings.checkpoints, settings.run, settings.keep_checkpoints, settings.keep_every, probe
    )
    about = {"run": settings.run, "model": str(settings.model), **_about(loss, learning)}
    training = Training(settings, learner, checkpoints, about, probe, incarnation)
    training.restore()
    return training


def _about(loss: LossSettings, learning: LearnerSettings) -> dict[str, Any]:
    return {"loss": loss.model_dump(mode="json"), "learner": learning.model_dump(mode="json")}


def _weights(settings: TrainSettings, learner: Learner) -> Weights:
    chosen = part(settings, WeightsSettings)
    dtype = getattr(torch, settings.weights_dtype) if settings.weights_dtype else learner.dtype
    ranks = lockstep.Ranks() if learner.ranks.world > 1 else lockstep.Alone()
    return Weights(chosen, learner.weights(dtype), ranks=ranks)


def _reward(settings: TrainSettings) -> Callable[[Group, Trajectory], float]:
    loss = part(settings, LossSettings)

    def reward(group: Group, member: Trajectory) -> float:
        generated = 0
        if loss.overlong_max is not None:
            generated = sum(int((row.versions >= 0).sum()) for row in build_rows(member))
        return reward_of(group, member, loss, generated)

    return reward


def _describe(settings: TrainSettings) -> Callable[[int], dict[str, Any]]:
    limits = Limits(settings.run, settings.max_age, settings.stale_tokens == "mask")
    made_with = Decided(part(settings, LossSettings), part(settings, LearnerSettings), limits)
    text = described(made_with)
    return lambda sequence: {"settings": text, "seed": settings.seed + sequence}
