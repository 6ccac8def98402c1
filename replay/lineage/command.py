"""`steplog replay lineage`: what the log knows about a trajectory, and its outcome in each run."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from pool.readers.reader import read_records
from pool.topics import LEDGER
from replay.lineage.outcomes import TrajectoryOutcome, find_mentions, find_outcomes
from replay.lineage.report import LineageReport
from replay.lineage.search import LoggedTrajectory, TrajectorySearch
from replay.settings import LineageSettings
from schemas import Decision, Record, ScoredGroup
from servicekit.command_line import print_line
from servicekit.errors import Fatal


def lineage(settings: LineageSettings, say: Callable[[str], None] = print_line) -> None:
    reports = find_lineages(settings)
    if not settings.json_:
        for line in (line for report in reports for line in report.lines()):
            say(line)
        return
    documents = [report.document() for report in reports]
    if reports[0].logged.uid == settings.trajectory:
        say(msgspec.json.encode(documents[0]).decode())
    else:
        group = {"group_uid": settings.trajectory, "trajectories": documents}
        say(msgspec.json.encode(group).decode())


def find_lineages(settings: LineageSettings) -> list[LineageReport]:
    """The report on the trajectory; for a posted group, one on each of its trajectories."""
    codec, uid = settings.codec(), settings.trajectory
    decisions = _by_run(asyncio.run(read_records(settings, LEDGER, codec)))
    if settings.run is not None and settings.run not in decisions:
        runs = ", ".join(decisions) or "none"
        raise Fatal(
            f"The ledger has no Decision of run {settings.run}; runs with Decisions: {runs}."
        )
    mentions = find_mentions((d for of_run in decisions.values() for d in of_run), uid)
    logged = TrajectorySearch(settings, codec, uid).find(settings.prompt, mentions)
    if not logged and not mentions:
        prompt = f" of prompt {settings.prompt}" if settings.prompt else ""
        raise Fatal(f"The log has no trajectory {uid}{prompt}, and no Decision names it.")
    runs_of_records = _runs(logged)
    runs_reported = (
        [settings.run]
        if settings.run is not None
        else [*decisions, *(runs_of_records - decisions.keys())]
    )
    members = [*logged.posted_uids(), *(mention.member.trajectory_uid for mention in mentions)]
    uids = [uid] if uid in members or not members else dict.fromkeys(members)
    return [_report(logged.of(uid), runs_reported, decisions) for uid in uids]


def _report(
    logged: LoggedTrajectory, runs: Iterable[str], decisions: Mapping[str, list[Decision]]
) -> LineageReport:
    return LineageReport(logged, [o for run in runs for o in _outcomes(run, decisions, logged)])


def _by_run(ledger: Iterable[Record]) -> dict[str, list[Decision]]:
    decisions: dict[str, list[Decision]] = {}
    for record in ledger:
        if isinstance(record, Decision):
            decisions.setdefault(record.run, []).append(record)
    return decisions


def _outcomes(
    run: str, decisions: Mapping[str, list[Decision]], logged: LoggedTrajectory
) -> list[TrajectoryOutcome]:
    of_run = decisions.get(run, [])
    copies = logged.rewarded.get(of_run[-1].topic, []) if of_run else []
    return find_outcomes(run, of_run, logged.uid, copies)


def _runs(logged: LoggedTrajectory) -> set[str]:
    rewarded = [received.record for copies in logged.rewarded.values() for received in copies]
    posted = [record for record in rewarded if isinstance(record, ScoredGroup)]
    steps = [received.record for received in logged.steps]
    records: list[Any] = [*logged.registrations, *steps, *posted]
    return {record.run for record in records}
