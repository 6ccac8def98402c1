"""The Atropos API under `/atropos` in the gateway's own server.

It behaves as `steplog atropos` does: a supervisor holds the sockets, because environments give up
after three seconds, and restarts a server that is killed. Gateway and Atropos API share the port, the
keys and the process. When another server takes over the run, only the Atropos API stops.
"""

import logging
from typing import Any

from gateway.atropos.http.app import AtroposApp
from gateway.atropos.http.gate import Gate
from gateway.atropos.service import run_parts
from gateway.atropos.settings import AtroposSettings
from gateway.atropos.supervisor import Supervision
from gateway.http.keys import Keys
from servicekit.errors import Fenced

log = logging.getLogger(__name__)

PREFIX = "/atropos"


class AtroposMount:
    def __init__(self, settings: AtroposSettings, keys: Keys) -> None:
        self._settings = settings
        self._gate = Gate()
        self._app = AtroposApp(self._gate, settings.max_body_bytes, keys)

    def wrap(self, gateway: Any) -> Any:
        """One ASGI app for both. Paths with more than one segment after the prefix belong to the
        gateway, since a trajectory may be named atropos."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            prefix, _, route = scope["path"][1:].partition("/")
            if f"/{prefix}" != PREFIX or "/" in route:
                await gateway(scope, receive, send)
            else:
                inner = {**scope, "path": f"/{route}", "root_path": PREFIX}
                await self._app(inner, receive, send)

        return app

    async def run(self, supervision: Supervision) -> None:
        """Runs until cancelled, or until another server takes over the run; raises when it cannot
        continue."""
        try:
            await run_parts(self._settings, self._gate, supervision)
        except Fenced as error:
            log.error("The Atropos API under %s stops: %s", PREFIX, error)
            self._gate.close(str(error))
