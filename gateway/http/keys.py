"""Who may call: API keys of tenants, and base URLs that are signed for one trajectory.

An agent is given a URL, not a key: its trajectory's part of the path carries the tenant, an expiry
and a signature, so it can write to that trajectory and to no other. The prompt's part stays free,
since clients put their own prompt there. Keys are kept as hashes and compared in constant time.
"""

import base64
import hashlib
import hmac
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pydantic import SecretStr

from gateway.errors import NotFound, Unauthorized
from gateway.http.exchange import Exchange
from servicekit.errors import Fatal

SEPARATOR = "~"
"""Between a trajectory's uid and its signature; never in a uid that we mint."""
SHORTEST_KEY = 16
TENANT = re.compile(r"[A-Za-z0-9_-]{1,64}")
SHA256 = re.compile(r"[0-9A-Fa-f]{64}")
NOBODY = ""
"""The tenant of everybody, where no keys are configured."""


class UnusableKeys(Fatal):
    """The configured keys cannot be used."""


class Keys:
    """`hashes` are pairs of a tenant and the SHA-256 of one of its keys."""

    def __init__(
        self, hashes: Iterable[tuple[str, bytes]] = (), secret: bytes | None = None
    ) -> None:
        self._hashes = list(hashes)
        derived = b"".join(sorted(digest for _, digest in self._hashes))
        self._secret = secret or hashlib.blake2b(derived, person=b"steplog-urls").digest()

    @property
    def are_required(self) -> bool:
        return bool(self._hashes)

    def tenant(self, key: str | None) -> str:
        """Whose key it is."""
        if not self._hashes:
            return NOBODY
        given = hashlib.sha256((key or "").encode()).digest()
        owner = None
        for tenant, digest in self._hashes:  # all of them, so that the time tells nothing
            if hmac.compare_digest(given, digest):
                owner = tenant
        if owner is None:
            raise Unauthorized(
                "this needs an API key: send it as `Authorization: Bearer KEY` or `x-api-key`, or in "
                "the URL, as http://any:KEY@HOST",
                code="invalid_api_key",
            )
        return owner

    def sign(self, uid: str, tenant: str, expires: int) -> str:
        """The trajectory's part of a base URL."""
        if not self._hashes:
            return uid
        claim = f"{tenant}.{expires}"
        return f"{uid}{SEPARATOR}{claim}.{self._signature(uid, claim)}"

    def open(self, segment: str) -> "Signed":
        """The trajectory that a path names, and whose it is."""
        if not self._hashes:
            return Signed(segment, NOBODY)
        uid, _, token = segment.partition(SEPARATOR)
        claim, _, signature = token.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(uid, claim).encode()):
            raise Unauthorized(
                "this base URL is not signed: get one from POST /init_trajectory with your key",
                code="unsigned_base_url",
            )
        tenant, _, expires = claim.rpartition(".")
        if int(expires) < time.time():
            raise NotFound("this base URL has expired", code="expired_base_url")
        return Signed(uid, tenant)

    def uid_of(self, segment: str) -> str:
        """For the log: what follows a uid is as good as a key."""
        return segment.partition(SEPARATOR)[0] if self._hashes else segment

    def _signature(self, uid: str, claim: str) -> str:
        digest = hmac.digest(self._secret, f"{uid}\n{claim}".encode(), "sha256")
        return base64.urlsafe_b64encode(digest[:18]).decode()


def api_key(exchange: Exchange) -> str | None:
    """As OpenAI's clients send it, or Anthropic's, or as any client does whose URL has a login: some
    take nothing but a URL."""
    kind, _, given = (exchange.header(b"authorization") or "").partition(" ")
    match kind.lower():
        case "bearer":
            return given.strip()
        case "basic":
            return _password(given)
    return exchange.header(b"x-api-key")


def _password(login: str) -> str | None:
    try:
        return base64.b64decode(login).decode().partition(":")[2]
    except ValueError:
        return None


class Signed(NamedTuple):
    uid: str
    tenant: str


def load_keys(given: SecretStr | None, file: Path | None, secret: SecretStr | None) -> Keys:
    pairs = given.get_secret_value().split(",") if given else []
    lines = [pair for pair in pairs if pair.strip()]
    if file is not None:
        try:
            lines += file.read_text().splitlines()
        except OSError as error:
            raise UnusableKeys(f"the keys in {file} cannot be read: {error.strerror}") from error
    hashes = [_pair(line.strip()) for line in lines if line.strip() and not line.startswith("#")]
    if (given is not None or file is not None) and not hashes:
        raise UnusableKeys("no API key is configured; a line is TENANT:KEY or TENANT:sha256:HEX")
    return Keys(hashes, secret.get_secret_value().encode() if secret else None)


def _pair(line: str) -> tuple[str, bytes]:
    tenant, _, key = line.partition(":")
    if not TENANT.fullmatch(tenant):
        raise UnusableKeys(
            "a line of keys must be TENANT:KEY or TENANT:sha256:HEX, with a TENANT of letters, "
            "digits, - and _"
        )
    kind, _, digest = key.partition(":")
    if kind == "sha256":
        if not SHA256.fullmatch(digest):
            raise UnusableKeys(f"the hash of {tenant}'s key must be 64 hexadecimal digits")
        return tenant, bytes.fromhex(digest)
    if len(key) < SHORTEST_KEY:
        raise UnusableKeys(
            f"the key of {tenant} is shorter than {SHORTEST_KEY} characters; "
            "make one with `steplog key`"
        )
    return tenant, hashlib.sha256(key.encode()).digest()
