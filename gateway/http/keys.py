"""Authentication: API keys of tenants, and base URLs that are signed for one trajectory.

An agent gets a URL, not a key: the trajectory's segment of the path carries the tenant, an expiry time
and a signature, so the agent can write to that trajectory and to no other. The prompt's segment is not
signed, because clients put their own prompt_uid there. Keys are kept as hashes and compared in constant
time.
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
"""Separates a trajectory's uid from its signature; never part of a uid that the gateway generates."""
MIN_KEY_LENGTH = 16
TENANT = re.compile(r"[A-Za-z0-9_-]{1,64}")
SHA256 = re.compile(r"[0-9A-Fa-f]{64}")
NO_TENANT = ""
"""Everybody's tenant if no keys are configured."""


class UnusableKeys(Fatal):
    """The configured keys cannot be used."""


class Keys:
    """The configured API keys. `hashes` are pairs of a tenant and the SHA-256 of one of its keys."""

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
        """The tenant that a key belongs to; refuses an unknown key."""
        if not self._hashes:
            return NO_TENANT
        key_hash = hashlib.sha256((key or "").encode()).digest()
        owner = None
        for tenant, digest in self._hashes:  # no early exit: the time must not depend on the key
            if hmac.compare_digest(key_hash, digest):
                owner = tenant
        if owner is None:
            raise Unauthorized(
                "Missing or unknown API key. Send a configured key as `Authorization: Bearer KEY`, as "
                "`x-api-key: KEY`, or in the URL as http://any:KEY@HOST.",
                code="invalid_api_key",
            )
        return owner

    def sign(self, uid: str, tenant: str, expires: int) -> str:
        """The trajectory's segment of a base URL."""
        if not self._hashes:
            return uid
        claim = f"{tenant}.{expires}"
        return f"{uid}{SEPARATOR}{claim}.{self._signature(uid, claim)}"

    def verify(self, segment: str) -> "SignedSegment":
        """The trajectory and tenant of a path's segment; refuses an unsigned, forged or expired one."""
        if not self._hashes:
            return SignedSegment(segment, NO_TENANT)
        uid, _, token = segment.partition(SEPARATOR)
        claim, _, signature = token.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(uid, claim).encode()):
            raise Unauthorized(
                "This base URL has no valid signature. Get a signed one from POST /init_trajectory "
                "with your API key.",
                code="unsigned_base_url",
            )
        tenant, _, expires = claim.rpartition(".")
        if int(expires) < time.time():
            raise NotFound(
                "This base URL has expired. Get a new one from POST /init_trajectory.",
                code="expired_base_url",
            )
        return SignedSegment(uid, tenant)

    def uid_of(self, segment: str) -> str:
        """The uid without its signature, for logs: the signature is a secret."""
        return segment.partition(SEPARATOR)[0] if self._hashes else segment

    def _signature(self, uid: str, claim: str) -> str:
        digest = hmac.digest(self._secret, f"{uid}\n{claim}".encode(), "sha256")
        return base64.urlsafe_b64encode(digest[:18]).decode()


def api_key(exchange: Exchange) -> str | None:
    """The API key of a request, as OpenAI's or Anthropic's clients send it, or as the password of a URL
    with a login: some clients only take a URL."""
    kind, _, credentials = (exchange.header(b"authorization") or "").partition(" ")
    match kind.lower():
        case "bearer":
            return credentials.strip()
        case "basic":
            return _password(credentials)
    return exchange.header(b"x-api-key")


def _password(login: str) -> str | None:
    try:
        return base64.b64decode(login).decode().partition(":")[2]
    except ValueError:
        return None


class SignedSegment(NamedTuple):
    """What a trajectory's segment of a path says."""

    uid: str
    tenant: str


def load_keys(inline: SecretStr | None, file: Path | None, secret: SecretStr | None) -> Keys:
    """The keys of the settings `keys` and `keys_file`; `secret` signs base URLs."""
    pairs = inline.get_secret_value().split(",") if inline else []
    lines = [pair for pair in pairs if pair.strip()]
    if file is not None:
        try:
            lines += file.read_text().splitlines()
        except OSError as error:
            raise UnusableKeys(f"Cannot read the keys file {file}: {error.strerror}") from error
    hashes = [_pair(line.strip()) for line in lines if line.strip() and not line.startswith("#")]
    if (inline is not None or file is not None) and not hashes:
        raise UnusableKeys(
            "The configured keys are empty. Add at least one, as TENANT:KEY or TENANT:sha256:HEX."
        )
    return Keys(hashes, secret.get_secret_value().encode() if secret else None)


def _pair(line: str) -> tuple[str, bytes]:
    tenant, _, key = line.partition(":")
    if not TENANT.fullmatch(tenant):
        raise UnusableKeys(
            "An API key must be configured as TENANT:KEY or TENANT:sha256:HEX, where TENANT is 1 to 64 "
            "letters, digits, - or _."
        )
    kind, _, digest = key.partition(":")
    if kind == "sha256":
        if not SHA256.fullmatch(digest):
            raise UnusableKeys(f"The hash of tenant {tenant}'s key must be 64 hexadecimal digits.")
        return tenant, bytes.fromhex(digest)
    if len(key) < MIN_KEY_LENGTH:
        raise UnusableKeys(
            f"Tenant {tenant}'s key is shorter than {MIN_KEY_LENGTH} characters. "
            "Generate one with `steplog key`."
        )
    return tenant, hashlib.sha256(key.encode()).digest()
