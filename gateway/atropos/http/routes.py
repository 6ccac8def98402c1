"""Every route as FastAPI knows it; `app` answers those that are asked all the time."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from starlette.middleware.gzip import GZipMiddleware

from gateway.atropos.http.bodies import EnvIdentifier, Register, RegisterEnv, ScoredData, refusal
from gateway.atropos.http.compression import COMPRESS_FROM, LEVEL
from gateway.atropos.http.scored_data import encode_group
from gateway.atropos.server import Server
from gateway.errors import Unavailable
from servicekit import distribution
from servicekit.status import make_status_app

STATUS_ROUTES = ("/health", "/ready", "/metrics", "/docs", "/openapi.json")
"""They answer before the state is rebuilt."""
NO_EXAMPLE: dict[str, list[Any]] = {
    name: []
    for name in (
        "tokens",
        "masks",
        "scores",
        "advantages",
        "ref_logprobs",
        "generation_params",
        "inference_logprobs",
        "messages",
        "images",
    )
}


class Gate:
    """`server` is None until the state is rebuilt; `problem` says why it is not, or not well."""

    def __init__(self) -> None:
        self.server: Server | None = None
        self.problem: Callable[[], str | None] = lambda: "the server is starting"
        self._over = ""
        self._opened = asyncio.Event()

    def open(self, server: Server, problem: Callable[[], str | None]) -> None:
        self.server, self.problem = server, problem
        self._opened.set()

    def close(self, reason: str) -> None:
        """For good: whoever waits, and whoever comes, is told why."""
        self.server, self.problem, self._over = None, lambda: reason, reason
        self._opened.set()

    async def ready(self) -> Server:
        if self.server is None:
            await self._opened.wait()
        if self.server is None:
            raise Unavailable(self._over)
        return self.server


def make_routes(gate: Gate) -> FastAPI:
    app = FastAPI(
        title="steplog atropos",
        version=distribution.version(),
        description="The Atropos rollout API on the log.",
        redoc_url=None,
    )
    app.add_middleware(GZipMiddleware, minimum_size=COMPRESS_FROM, compresslevel=LEVEL)
    app.add_exception_handler(RequestValidationError, _refuse)
    app.include_router(make_status_app("atropos", lambda: gate.problem()).router)
    _add_trainer_routes(app, gate)
    _add_env_routes(app, gate)
    _document_what_is_asked_often(app)
    return app


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return Response(refusal(error), 422, media_type="application/json")


def _add_trainer_routes(app: FastAPI, gate: Gate) -> None:
    @app.get("/")
    async def root() -> dict[str, str]:
        return {"message": "AtroposLib API"}

    @app.post("/register")
    async def register(body: Register) -> Response:
        await (await gate.ready()).register(body.training())
        # Longer than most JSON encoders take for an integer.
        return Response(f'{{"uuid":{secrets.randbits(128)}}}', media_type="application/json")

    @app.get("/wandb_info")
    async def wandb_info() -> dict[str, str | None]:
        training = (await gate.ready()).state.training
        group, project = (
            (training.wandb_group, training.wandb_project) if training else (None, None)
        )
        return {"group": group, "project": project}

    @app.get("/info")
    async def info() -> dict[str, int]:
        state = (await gate.ready()).state
        return {"batch_size": state.batch_size, "max_token_len": state.max_token_len}

    @app.get("/latest_example")
    async def latest_example() -> Response:
        latest = (await gate.ready()).state.latest
        body = encode_group(latest.record) if latest else msgspec.json.encode(NO_EXAMPLE)
        return Response(body, media_type="application/json")

    @app.get("/reset_data")
    async def reset_data() -> PlainTextResponse:
        await (await gate.ready()).reset()
        return PlainTextResponse("Reset successful")


def _add_env_routes(app: FastAPI, gate: Gate) -> None:
    @app.post("/register-env")
    async def register_env(body: RegisterEnv) -> dict[str, Any]:
        return await (await gate.ready()).register_env(body.env())

    @app.post("/disconnect-env")
    async def disconnect_env(body: EnvIdentifier) -> dict[str, Any]:
        return await (await gate.ready()).disconnect_env(body.env_id)


def _document_what_is_asked_often(app: FastAPI) -> None:
    """`app.AtroposApp` answers these before FastAPI sees them."""

    @app.get("/batch")
    async def batch() -> dict[str, Any]:
        raise AssertionError

    @app.get("/status")
    async def status() -> dict[str, int]:
        raise AssertionError

    @app.get("/status-env")
    async def status_env(body: EnvIdentifier) -> dict[str, Any]:
        raise AssertionError(body)

    @app.post("/scored_data")
    async def scored_data(body: ScoredData) -> dict[str, Any]:
        raise AssertionError(body)

    @app.post("/scored_data_list")
    async def scored_data_list(body: list[ScoredData]) -> dict[str, Any]:
        raise AssertionError(body)
