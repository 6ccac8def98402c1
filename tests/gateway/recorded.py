"""What the log has, against what agents were told: the invariants I1 and I2.

I1 durable     every call whose answer completed is in `steps` once by its id, with the ids of the
               answer; copies under one id are equal, and readers fold them
I2 no phantom  every Step belongs to a call that was sent

The engines are those of `echo_engine`, the calls those of `load`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from pool.connection import Connection
from pool.core.progress import Received
from pool.core.prompts import full_prompts
from pool.core.trajectories import Trajectory, TrajectoryAssembler, step_of
from pool.topics import STEPS
from schemas import Step
from schemas.packing import unpack_ids, unpack_logprobs
from tests.gateway.echo_engine import echo_of
from tests.gateway.load import Sent
from tests.pool.log import messages
from tests.tiny_model import EOS

TEXT = re.compile(rb"\[\[[^\[\]]*\]\]")


class Recorded:
    """The Steps of `steps`, each id once, and the trajectories that are closed."""

    def __init__(self, connection: Connection) -> None:
        codec = connection.codec()
        found = [
            Received(codec.decode(message.value), message.partition, message.offset)
            for message in messages(connection, STEPS)
        ]
        self.steps: dict[str, Step] = {}
        self.copies = 0
        """Records that an earlier one under the same id makes superfluous."""
        for received in found:
            if isinstance(received.record, Step):
                self._add(received.record)
        self.prompts = self._prompts()
        self.by_text: defaultdict[str, list[Step]] = defaultdict(list)
        for step in self.steps.values():
            self.by_text[self.text(step)].append(step)
        self.closed = {item.uid: item for item in _assembled(found)}

    def _add(self, step: Step) -> None:
        same = self.steps.setdefault(step.step_id, step)
        self.copies += same is not step
        assert same == step, f"two different Steps have the id {step.step_id}"

    def _prompts(self) -> dict[str, list[int]]:
        trajectories: defaultdict[str, list[Step]] = defaultdict(list)
        for step in self.steps.values():
            trajectories[step.trajectory_uid].append(step)
        return {
            step_id: list(unpack_ids(prompt))
            for steps in trajectories.values()
            for step_id, prompt in full_prompts(steps).items()
        }

    def text(self, step: Step) -> str:
        """What the newest message of a Step's prompt asked for."""
        plain = bytes(number for number in self.prompts[step.step_id] if number < 256)
        texts: list[bytes] = TEXT.findall(plain)
        return texts[-1].decode() if texts else ""

    def content(self, step: Step) -> str:
        """What the Step's agent was told, if it was told anything."""
        return bytes(number for number in unpack_ids(step.response_ids) if number < 256).decode()

    def check(self, sent: Sequence[Sent], completed: Iterable[str] = ()) -> None:
        """I1 and I2, and that trajectories which agents completed are whole."""
        self.check_well_formed()
        by_text = {call.text: call for call in sent}
        assert len(by_text) == len(sent)
        for step in self.steps.values():
            call = by_text.get(self.text(step))
            assert call is not None, f"I2: nobody asked for {step}"
            assert call.uid == step.trajectory_uid, f"I2: {step} is of another trajectory"
        for call in sent:
            if call.step_id is not None:
                self._check_durable(call)
        for uid in completed:
            self._check_whole(uid, [call for call in sent if call.uid == uid])

    def check_well_formed(self) -> None:
        for step in self.steps.values():
            ids, logprobs = unpack_ids(step.response_ids), unpack_logprobs(step.response_logprobs)
            assert len(ids) == len(logprobs) > 0
            assert ids[-1] == EOS and step.finish_reason == "stop"
            asked = echo_of(self.prompts[step.step_id])
            assert self.content(step).startswith(f"{asked}."), "it answers another prompt"

    def _check_durable(self, call: Sent) -> None:
        step = self.steps.get(call.step_id or "")
        assert step is not None, f"I1: lost {call}"
        assert self.text(step) == call.text, f"I1: {call} was given the answer to another call"
        assert self.content(step) == call.content, f"I1: {call} was told something else"

    def _check_whole(self, uid: str, calls: Sequence[Sent]) -> None:
        trajectory = self.closed[uid]
        assert trajectory.problem is None, trajectory.problem
        steps = {step_of(received).step_id for received in trajectory.steps}
        missing = [call for call in calls if call.step_id and call.step_id not in steps]
        assert not missing, f"I1: the trajectory ended without {missing}"
        lost = [call for call in calls if call.step_id in trajectory.orphans]
        assert not lost, f"the trajectory went on from another answer than {lost}"


def _assembled(found: Iterable[Received]) -> Iterable[Trajectory]:
    assemblers: defaultdict[int, TrajectoryAssembler] = defaultdict(TrajectoryAssembler)
    for received in found:
        item = assemblers[received.partition].feed(received)
        if isinstance(item, Trajectory):
            yield item
