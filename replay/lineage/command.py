"""`steplog replay lineage`: all that the log knows of a trajectory, and what became of it."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from pool.readers.reader import read_records
from pool.topics import LEDGER
from replay.lineage.outcomes import Fate, fates, namings
from replay.lineage.report import Lineage
from replay.lineage.search import Finder, Traces
from replay.settings import LineageSettings
from schemas import Decision, Record, ScoredGroup
from servicekit.command_line import print_line
from servicekit.errors import Fatal


def lineage(settings: LineageSettings, say: Callable[[str], None] = print_line) -> None:
    found = find_lineages(settings)
    if settings.json_:
        documents = [one.document() for one in found]
        is_group = found[0].traces.uid != settings.trajectory
        about = {"group_uid": settings.trajectory, "trajectories": documents}
        say(msgspec.json.encode(about if is_group else documents[0]).decode())
    else:
        for line in (line for one in found for line in one.lines()):
            say(line)


def find_lineages(settings: LineageSettings) -> list[Lineage]:
    """Of the trajectory; of a posted group, those of all its trajectories."""
    codec, uid = settings.codec(), settings.trajectory
    decisions = _by_run(asyncio.run(read_records(settings, LEDGER, codec)))
    if settings.run is not None and settings.run not in decisions:
        there = ", ".join(decisions) or "none"
        raise Fatal(f"the ledger has no Decision of run {settings.run}; it has those of: {there}")
    named = namings((d for made in decisions.values() for d in made), uid)
    traces = Finder(settings, codec, uid).find(settings.prompt, named)
    if not traces and not named:
        under = f" under prompt {settings.prompt}" if settings.prompt else ""
        raise Fatal(f"the log has no trajectory {uid}{under}, and the ledger does not name it")
    own = _runs(traces)
    wanted = [settings.run] if settings.run is not None else [*decisions, *(own - decisions.keys())]
    members = dict.fromkeys([*traces.posted(), *(one.member.trajectory_uid for one in named)])
    each = [traces.of(one) for one in ([uid] if uid in members or not members else members)]
    return [
        Lineage(one, [f for run in wanted for f in _fates(run, decisions, one)]) for one in each
    ]


def _by_run(ledger: Iterable[Record]) -> dict[str, list[Decision]]:
    found: dict[str, list[Decision]] = {}
    for record in ledger:
        if isinstance(record, Decision):
            found.setdefault(record.run, []).append(record)
    return found


def _fates(run: str, decisions: Mapping[str, list[Decision]], traces: Traces) -> list[Fate]:
    made = decisions.get(run, [])
    copies = traces.rewarded.get(made[-1].topic, []) if made else []
    return fates(run, made, traces.uid, copies)


def _runs(traces: Traces) -> set[str]:
    scored = [one for found in traces.rewarded.values() for one in found]
    posted = [one.record for one in scored if isinstance(one.record, ScoredGroup)]
    records: list[Any] = [*traces.registrations, *(one.record for one in traces.steps), *posted]
    return {record.run for record in records}
