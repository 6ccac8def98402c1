"""One vLLM server, as the trainer sees it: the routes that control its weights.

Every call has a deadline and ends in an answer or in `EngineFailed`, whose text is one sentence: which
engine, in which phase, what happened. The routes exist in development mode only
(`VLLM_SERVER_DEV_MODE=1`), and weights can be sent to servers with `--weight-transfer-config`.
"""

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from pool.core.versions import Version

NO_LABEL = "none"
"""The label of weights that are of no version, because an update broke off."""
TOLD = 300
"""Characters of an engine's own words that an error repeats."""

# Engines are named by address; a proxy of the environment has no business between us and them.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class EngineFailed(Exception):
    """`answered`: it said no. Otherwise it is gone, or hangs."""

    def __init__(self, url: str, phase: str, reason: str, answered: bool) -> None:
        super().__init__(f"engine {url} failed to {phase}: {reason}")
        self.url = url
        self.phase = phase
        self.reason = reason
        self.answered = answered


@dataclass(frozen=True, slots=True)
class State:
    """What an engine says of itself."""

    label: str
    paused: bool
    world_size: int
    """Its workers; each is one rank of the process group."""

    @property
    def version(self) -> Version | None:
        return Version.parse(self.label)


class Engine:
    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def look(self, limit: float) -> State:
        return State(
            label=self.label(limit, "look"),
            paused=bool(self._get("look", "/is_paused", "is_paused", limit)),
            world_size=int(self._get("look", "/get_world_size", "world_size", limit)),
        )

    def label(self, limit: float, phase: str) -> str:
        return str(self._get(phase, "/weight_info", "weight_version", limit))

    def pause(self, limit: float) -> None:
        """Running calls stay and go on afterwards. Caches are emptied, which is what the route does
        unless told otherwise: no later token may be computed from keys and values of old weights."""
        self._post("pause", "/pause?mode=keep", None, limit)

    def join(self, info: dict[str, Any], limit: float) -> None:
        self._post("join", "/init_weight_transfer_engine", {"init_info": info}, limit)

    def start(self, limit: float) -> None:
        self._post("start", "/start_weight_update", None, limit)

    def update(self, info: Any, limit: float) -> None:
        self._post("update", "/update_weights", {"update_info": info}, limit)

    def finish(self, label: str | None, limit: float) -> None:
        body = {} if label is None else {"weight_version": label}
        self._post("finish", "/finish_weight_update", body, limit)

    def mend(self, limit: float) -> None:
        """Ends an update that broke off. vLLM would count what it had received towards the next one,
        take a layer for complete too early and leave out the rest of it."""
        try:
            self.start(limit)
        except EngineFailed as error:
            if not error.answered:
                raise
        # It had not ended in vLLM's eyes, then; in either case there is one now that can be ended.
        self.finish(None, limit)

    def disown(self, limit: float) -> None:
        """Takes the label off, so that nobody counts on these weights."""
        self._post("disown", "/update_weight_version", {"new_version": NO_LABEL}, limit)

    def resume(self, limit: float) -> None:
        self._post("resume", "/resume", None, limit)

    def generate(self, body: dict[str, Any], limit: float) -> Any:
        return self._post("generate", "/inference/v1/generate", body, limit)

    def _get(self, phase: str, path: str, field: str, limit: float) -> Any:
        answer = self._call(phase, urllib.request.Request(self.url + path), limit)
        if not isinstance(answer, dict) or field not in answer:
            raise EngineFailed(self.url, phase, f"its answer has no {field}", answered=True)
        return answer[field]

    def _post(self, phase: str, path: str, body: Any, limit: float) -> Any:
        data = json.dumps({} if body is None else body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        return self._call(phase, request, limit)

    def _call(self, phase: str, request: urllib.request.Request, limit: float) -> Any:
        try:
            with _open(request, timeout=limit) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            reason = f"it answered {error.code}: {_words(error)}"
            raise EngineFailed(self.url, phase, reason, answered=True) from None
        except (OSError, http.client.HTTPException) as error:
            reason = _trouble(error, limit)
            raise EngineFailed(self.url, phase, reason, answered=False) from None
        except ValueError:
            raise EngineFailed(self.url, phase, "its answer is no JSON", answered=True) from None


def _words(error: urllib.error.HTTPError) -> str:
    try:
        return error.read()[:TOLD].decode("utf-8", "replace").strip() or error.reason
    except (OSError, http.client.HTTPException):
        return error.reason


def _trouble(error: Exception, limit: float) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return f"no answer within {limit:g} s"
    return str(cause) or type(cause).__name__
