"""Client for the routes of one vLLM server that control its weights.

Every call has a timeout and ends in a response or in `EngineCallFailed`, whose text is one sentence:
which engine, in which phase, what happened. The routes exist in development mode only
(`VLLM_SERVER_DEV_MODE=1`), and weights can only be sent to servers started with
`--weight-transfer-config`.
"""

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from pool.core.versions import Version
from trainer.weights import plugin

NO_LABEL = "none"
"""The label of weights that belong to no version, because an update was interrupted."""
MAX_QUOTED = 300
"""Characters of an engine's error response that our error message quotes."""

# Engines are addressed directly; a proxy set in the environment must not come between.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class EngineCallFailed(Exception):
    """A call to an engine failed. `answered` is True if it responded with an error, and False if it
    could not be reached or timed out."""

    def __init__(self, url: str, phase: str, reason: str, answered: bool) -> None:
        super().__init__(f"engine {url} failed in phase {phase}: {reason}")
        self.url = url
        self.phase = phase
        self.reason = reason
        self.answered = answered


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine reports about itself."""

    label: str
    is_paused: bool
    world_size: int
    """Number of its workers; each is one rank of the process group."""

    @property
    def version(self) -> Version | None:
        return Version.parse(self.label)


class EngineControl:
    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def read_state(self, timeout: float) -> EngineState:
        return EngineState(
            label=self.label(timeout, "look"),
            is_paused=bool(self._get("look", "/is_paused", "is_paused", timeout)),
            world_size=int(self._get("look", "/get_world_size", "world_size", timeout)),
        )

    def label(self, timeout: float, phase: str) -> str:
        return str(self._get(phase, "/weight_info", "weight_version", timeout))

    def largest_adapter(self, timeout: float) -> int | None:
        """The largest rank of LoRA adapters that it can be sent; None if it takes whole models only."""
        config = self._get("look", "/server_info?config_format=json", "vllm_config", timeout)
        lora, transfer = config.get("lora_config"), config.get("weight_transfer_config")
        if lora is None or transfer is None or transfer["backend"] not in plugin.ENGINES:
            return None
        return int(lora["max_lora_rank"])

    def pause(self, timeout: float, keep_kv: bool = False) -> None:
        """Pauses generation; running calls continue after `resume`. The caches are emptied, and running
        calls computed again, so that no later token is sampled from keys and values of old weights;
        with `keep_kv` they are not."""
        clear_cache = str(not keep_kv).lower()
        self._post("pause", f"/pause?mode=keep&clear_cache={clear_cache}", None, timeout)

    def join(self, info: dict[str, Any], timeout: float) -> None:
        self._post("join", "/init_weight_transfer_engine", {"init_info": info}, timeout)

    def start(self, timeout: float) -> None:
        self._post("start", "/start_weight_update", None, timeout)

    def update(self, info: Any, timeout: float) -> None:
        self._post("update", "/update_weights", {"update_info": info}, timeout)

    def finish(self, label: str | None, timeout: float) -> None:
        body = {} if label is None else {"weight_version": label}
        self._post("finish", "/finish_weight_update", body, timeout)

    def end_interrupted_update(self, timeout: float) -> None:
        """Ends an update that was interrupted. Otherwise vLLM would count the tensors it had received
        towards the next update, consider a layer complete too early and ignore the rest of it."""
        try:
            self.start(timeout)
        except EngineCallFailed as error:
            if not error.answered:
                raise
        # An error means that an update was still open; in either case there is one to finish now.
        self.finish(None, timeout)

    def clear_label(self, timeout: float) -> None:
        """Removes the version label, so that nothing relies on these weights."""
        self._post("clear label", "/update_weight_version", {"new_version": NO_LABEL}, timeout)

    def resume(self, timeout: float) -> None:
        self._post("resume", "/resume", None, timeout)

    def generate(self, body: dict[str, Any], timeout: float) -> Any:
        return self._post("generate", "/inference/v1/generate", body, timeout)

    def _get(self, phase: str, path: str, field: str, timeout: float) -> Any:
        response = self._call(phase, urllib.request.Request(self.url + path), timeout)
        if not isinstance(response, dict) or field not in response:
            raise EngineCallFailed(
                self.url, phase, f"its response has no field {field}", answered=True
            )
        return response[field]

    def _post(self, phase: str, path: str, body: Any, timeout: float) -> Any:
        data = json.dumps({} if body is None else body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        return self._call(phase, request, timeout)

    def _call(self, phase: str, request: urllib.request.Request, timeout: float) -> Any:
        try:
            with _open(request, timeout=timeout) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            reason = f"it responded with {error.code}: {_quote(error)}"
            raise EngineCallFailed(self.url, phase, reason, answered=True) from None
        except (OSError, http.client.HTTPException) as error:
            reason = _describe(error, timeout)
            raise EngineCallFailed(self.url, phase, reason, answered=False) from None
        except ValueError:
            raise EngineCallFailed(
                self.url, phase, "its response is not JSON", answered=True
            ) from None


def _quote(error: urllib.error.HTTPError) -> str:
    try:
        return error.read()[:MAX_QUOTED].decode("utf-8", "replace").strip() or error.reason
    except (OSError, http.client.HTTPException):
        return error.reason


def _describe(error: Exception, timeout: float) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return f"no response within {timeout:g} s"
    return str(cause) or type(cause).__name__
