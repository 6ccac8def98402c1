"""The Atropos API in the gateway's own server, under `/atropos`.

It is the same API with the same lives: a keeper holds the sockets, since environments give up after
three seconds, and a server that is killed is made again behind it. What the two have in common is the
port, the keys and the process; when another server takes the run over, only this part ends.
"""

import logging
from typing import Any

from gateway.atropos.http.app import AtroposApp
from gateway.atropos.http.routes import Gate
from gateway.atropos.service import run_parts
from gateway.atropos.settings import AtroposSettings
from gateway.atropos.supervisor import Life
from gateway.http.keys import Keys
from servicekit.errors import Fenced

log = logging.getLogger(__name__)

PREFIX = "/atropos"


class Mounted:
    def __init__(self, settings: AtroposSettings, keys: Keys) -> None:
        self._settings = settings
        self._gate = Gate()
        self._app = AtroposApp(self._gate, settings.max_body_bytes, keys)

    def beside(self, gateway: Any) -> Any:
        """Both as one app. A path with more parts is the gateway's: a trajectory may be called
        atropos."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            prefix, _, route = scope["path"][1:].partition("/")
            if f"/{prefix}" != PREFIX or "/" in route:
                await gateway(scope, receive, send)
            else:
                inner = {**scope, "path": f"/{route}", "root_path": PREFIX}
                await self._app(inner, receive, send)

        return app

    async def run(self, life: Life) -> None:
        """Until cancelled, or until another server serves the run; raises when it cannot go on."""
        try:
            await run_parts(self._settings, self._gate, life)
        except Fenced as error:
            log.error("%s ends: %s", PREFIX, error)
            self._gate.close(str(error))
