"""The gateway's work, route by route, on parts that are all running."""

import hashlib
import time
import uuid
from typing import Any
from urllib.parse import quote

import msgspec

from gateway import metrics
from gateway.calls import submission as whitebox
from gateway.calls.answers import answer as answer_of
from gateway.calls.call import Call, Recorder
from gateway.calls.delivery import deliver, deliver_again, send_whole
from gateway.calls.generation import Generator
from gateway.calls.unbound_calls import Unbound
from gateway.dialects import generate as token_level
from gateway.dialects.request import Dialect, Request
from gateway.engines.fleet import Engines
from gateway.engines.policy import Policy
from gateway.errors import BadRequest, NotFound
from gateway.http.bodies import Complete, Init, Rate, Register, decode, finite, metadata_text
from gateway.http.exchange import Exchange
from gateway.http.keys import Keys, api_key
from gateway.settings import GatewaySettings
from gateway.state.log import Log
from gateway.state.trajectories import Completion, Trajectories
from gateway.state.trajectory import Trajectory
from schemas import Feedback
from servicekit import tracing

PROBE_TOKENS = 16
"""Agent frameworks try a URL with a call of a token or a few."""
PROBE_BYTES = 300
UNBOUND = "unbound"
"""Channel of recorded calls that name no trajectory."""
OK = b'{"status":"ok"}'
DEFAULT_PORTS = {"http": "80", "https": "443"}
ID_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_")
"""What the dialects put before a step_id."""


class Gateway:
    def __init__(
        self,
        settings: GatewaySettings,
        keys: Keys,
        log: Log,
        trajectories: Trajectories,
        generator: Generator,
        policy: Policy,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._log = log
        self._trajectories = trajectories
        self._generator = generator
        self._policy = policy
        self._submission = whitebox.Submission(log, trajectories, policy)
        self._recorder = Recorder(generator, log, trajectories, settings.max_prompt_tokens)
        self._unbound = Unbound(self._recorder, settings.unbound_channel or UNBOUND)

    @property
    def engines(self) -> Engines:
        return self._generator.engines

    def waits_for(self) -> list[str]:
        """Why calls cannot be answered now."""
        reasons = ["Kafka does not acknowledge"] if self._log.stalled() else []
        if not self.engines.usable():
            reasons.append("no engine is usable")
        return reasons

    # LLM calls

    async def call(self, exchange: Exchange, dialect: Dialect) -> None:
        """A call of a trajectory: one Step."""
        uid, tenant, prompt_uid = self._named(exchange)
        body = await exchange.body()
        request = self._limited(dialect.parse(body))
        self._log.check()
        trajectory = await self._trajectories.for_call(uid, prompt_uid, tenant)
        request_hash = hashlib.blake2b(body, digest_size=12, person=dialect.name.encode()).digest()
        call = None
        if exchange.header(b"x-stainless-retry-count") not in (None, "0"):
            await self._trajectories.ensure_registered(trajectory)
            # Of equal requests the newest is meant: one that has no Step yet.
            call = _earlier_call(trajectory, request_hash)
            written = trajectory.written(request_hash)
            if call is None and written is not None:
                prompt = trajectory.prompt_of(written.step) if request.token_ids else b""
                await deliver_again(exchange, dialect, self._recorder, request, written, prompt)
                return
        if call is None:
            call = Call(self._recorder, trajectory, request, request_hash, len(body)).start()
        if tracing.is_enabled():
            tracing.current().set_attributes(**call.ids)
        await deliver(exchange, dialect, call)

    def _limited(self, request: Request) -> Request:
        limit = self._settings.max_response_tokens
        if limit is not None:
            asked = request.sampling.get("max_tokens", limit)
            request.sampling["max_tokens"] = min(asked, limit)
        return request

    async def unbound_call(self, exchange: Exchange, dialect: Dialect) -> None:
        """A call without a trajectory: frameworks see whether the URL works, which is not recorded,
        or it is made a trajectory of its own, where that is asked for."""
        tenant = self._keys.tenant(api_key(exchange))
        body = await exchange.body()
        if self._settings.unbound_channel is not None and not _is_probe(body):
            self._log.check()
            await self._unbound.answer(exchange, dialect, body, tenant, scope(tenant))
            return
        request = dialect.parse(body)
        if request.sampling.get("max_tokens", PROBE_TOKENS + 1) > PROBE_TOKENS:
            raise BadRequest(
                "this URL names no trajectory, so the call would not be recorded; use a base_url "
                "from POST /init_trajectory, or /TRAJECTORY_UID/PROMPT_UID/v1, or start the gateway "
                "with --unbound-channel",
                code="no_trajectory",
            )
        prompt = self._generator.renderer.prompt(request)
        outcome = await self._generator.generate(request, prompt.ids, None, None)
        told = answer_of(
            uuid.uuid4().hex,
            int(time.time()),
            outcome.model,
            outcome.told,
            outcome.sample,
            len(prompt),
        )
        await send_whole(exchange, dialect, request, told)

    def check_caller(self, exchange: Exchange) -> None:
        """Refuses who has neither a signed base URL nor a key."""
        if "trajectory_uid" in exchange.scope["path_params"]:
            self._keys.open(exchange.uid("trajectory_uid"))
        else:
            self._keys.tenant(api_key(exchange))

    async def count_tokens(self, exchange: Exchange, request: Request) -> None:
        prompt = self._generator.renderer.prompt(request)
        await exchange.reply(200, b'{"input_tokens":%d}' % len(prompt))

    async def models(self, exchange: Exchange) -> None:
        names = self.engines.models()
        cards = [
            {"id": name, "object": "model", "created": 0, "owned_by": "steplog"} for name in names
        ]
        await exchange.reply(200, msgspec.json.encode({"object": "list", "data": cards}))

    async def tell_policy(self, exchange: Exchange) -> None:
        """The newest version that all engines had; none, if no trainer has given any yet."""
        live = self._policy.live
        told = {
            "run": self._policy.run,
            "incarnation": live and live.incarnation,
            "version": live and live.number,
        }
        await exchange.reply(200, msgspec.json.encode(told))

    # Trajectories

    async def init(self, exchange: Exchange) -> None:
        tenant = self._keys.tenant(api_key(exchange))
        asked = decode(await exchange.body(), Init)
        uid, prompt = uuid.uuid4().hex, asked.prompt_uid or uuid.uuid4().hex
        if "/" in prompt or prompt in (".", "..") or not prompt.isprintable():
            raise BadRequest(
                "prompt_uid stands in a path: it must be printable, hold no / and not be . or ..",
                param="prompt_uid",
            )
        if asked != Init():
            # Without any wish there is nothing to remember: the first call registers it.
            registration = self._trajectories.new_registration(
                uid,
                scope(tenant) + prompt,
                tenant,
                channel=asked.channel,
                metadata=metadata_text(asked.metadata),
                group_size=asked.group_size,
                deadline_s=asked.deadline_s,
            )
            await self._trajectories.begin(registration)
        lifetime = asked.deadline_s or self._settings.deadline_s
        segment = self._keys.sign(uid, tenant, int(time.time() + lifetime))
        url = f"{public_url(exchange)}/{segment}/{quote(prompt, safe='')}/v1"
        await exchange.reply(200, msgspec.json.encode({"trajectory_uid": uid, "base_url": url}))

    async def register(self, exchange: Exchange) -> None:
        uid, tenant, prompt_uid = self._named(exchange)
        asked = decode(await exchange.body(), Register)
        metadata = metadata_text(asked.metadata)
        trajectory = await self._trajectories.for_call(uid, prompt_uid, tenant, asked.channel)
        changes: dict[str, Any] = {
            "channel": asked.channel,
            "metadata": metadata,
            "group_size": asked.group_size,
            "deadline": asked.deadline_s and int((time.time() + asked.deadline_s) * 1000),
        }
        given = {name: value for name, value in changes.items() if value is not None}
        await self._trajectories.change(trajectory, **given)
        await exchange.reply(200, OK)

    async def complete(self, exchange: Exchange) -> None:
        uid, tenant, prompt_uid = self._named(exchange)
        asked = decode(await exchange.body(), Complete)
        about = Completion(
            status=asked.status,
            reward=finite(asked.reward),
            reward_expected=asked.reward_expected,
            channel=asked.channel,
            reason=asked.reason,
        )
        trajectory = await self._trajectories.existing(uid, prompt_uid, tenant)
        await self._trajectories.complete(trajectory, about)
        await exchange.reply(200, OK)

    async def rate(self, exchange: Exchange) -> None:
        """Feedback on a trajectory or one of its Steps, open or closed."""
        uid, tenant, prompt_uid = self._named(exchange)
        asked = decode(await exchange.body(), Rate)
        reward = finite(asked.reward)
        metadata = metadata_text(asked.metadata)
        trajectory = await self._trajectories.existing(uid, prompt_uid, tenant)
        step_id = asked.step_id and _step_id(trajectory, asked.step_id)
        registration = trajectory.registration
        await self._log.write(
            Feedback(
                feedback_id=str(uuid.uuid4()),
                trajectory_uid=uid,
                prompt_uid=prompt_uid,
                run=registration.run,
                channel=registration.channel,
                step_id=step_id,
                reward=reward or 0.0,
                metadata=metadata or "{}",
                created_at=int(time.time() * 1000),
            )
        )
        await exchange.reply(200, OK)

    def _named(self, exchange: Exchange) -> tuple[str, str, str]:
        uid, tenant = self._keys.open(exchange.uid("trajectory_uid"))
        return uid, tenant, scope(tenant) + exchange.uid("prompt_uid")

    # White-box agents

    async def generate(self, exchange: Exchange) -> None:
        """In our own shape nothing is recorded: the agent submits its Steps. In the shapes of other
        servers the client does not know of us, and what it gets is recorded here."""
        tenant = self._keys.tenant(api_key(exchange))
        body = await exchange.body()
        asked = token_level.asked_of(body)
        if asked is None:
            await exchange.reply(200, await whitebox.generate(self._generator, body))
            return
        self._limited(asked.request)
        renderer = self._generator.renderer
        prompt = renderer.prompt(asked.request).ids
        if asked.prompt_logprobs is not None:
            found = await self._generator.prompt_logprobs(prompt, asked.prompt_logprobs)
            await exchange.reply(200, token_level.told_logprobs(prompt, found))
            return
        self._log.check()
        steps = await self._unbound.sample(
            exchange, asked.request, asked.count, body, tenant, scope(tenant)
        )
        await exchange.reply(200, token_level.told(asked, steps, prompt, renderer))

    async def submit(self, exchange: Exchange, channel: str) -> None:
        tenant = self._keys.tenant(api_key(exchange))
        self._log.check()
        body = await exchange.body()
        accepted = await self._submission.submit(body, channel, tenant, scope(tenant))
        await exchange.reply(200, b'{"accepted":%d}' % accepted)

    async def compute_reward(self, exchange: Exchange) -> None:
        self._keys.tenant(api_key(exchange))
        session, url = self.engines.session, self._settings.reward
        body = await exchange.body()
        await exchange.reply(200, await whitebox.compute_reward(session, url, body))


def _is_probe(body: bytes) -> bool:
    """One token of a short text: some frameworks ask for that every second, to see whether we live."""
    if len(body) > PROBE_BYTES:
        return False
    try:
        asked = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return False
    return isinstance(asked, dict) and asked.get("max_tokens") == 1


def _earlier_call(trajectory: Trajectory, request_hash: bytes) -> Call | None:
    """The attempt that a retry repeats, if it left no Step: running, or begun again."""
    running = trajectory.running_call(request_hash)
    if running is not None:
        metrics.retries_served.labels("joined").inc()
        return running
    unfinished = trajectory.unfinished(request_hash)
    if unfinished is None:
        return None
    metrics.retries_served.labels("regenerated").inc()
    return unfinished.start()


def _step_id(trajectory: Trajectory, given: str) -> str:
    """An answer's id is its Step's, behind a prefix."""
    prefix = next((prefix for prefix in ID_PREFIXES if given.startswith(prefix)), "")
    step_id = given.removeprefix(prefix)
    if not trajectory.has_step(step_id):
        raise NotFound(f"trajectory {trajectory.uid} has no step {step_id}", param="step_id")
    return step_id


def scope(tenant: str) -> str:
    """Goes before a tenant's prompt_uids, so that nobody can join another tenant's groups."""
    return f"{tenant}/" if tenant else ""


def public_url(exchange: Exchange) -> str:
    """The address that the client used, through whatever proxies."""
    header = exchange.header
    scheme = _first(header(b"x-forwarded-proto")) or exchange.scope["scheme"]
    host = _first(header(b"x-forwarded-host")) or header(b"host") or "127.0.0.1"
    port = _first(header(b"x-forwarded-port"))
    has_port = ":" in host.rpartition("]")[2]
    if port and not has_port and port != DEFAULT_PORTS.get(scheme):
        host = f"{host}:{port}"
    prefix = (_first(header(b"x-forwarded-prefix")) or "").strip("/")
    return f"{scheme}://{host}" + (f"/{prefix}" if prefix else "")


def _first(value: str | None) -> str | None:
    """Each proxy may add its own; the first is the client's."""
    return value.partition(",")[0].strip() if value else None
