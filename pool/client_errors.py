"""Why a cluster cannot be used, in words that name the setting to look at.

A confluent-kafka client tells the reason to its `error_cb` and tries again; the call that waits
learns only that time is up. `ClientErrors` remembers the reason for it.
"""

import re
import time

from confluent_kafka import KafkaError

from pool.connection import Connection
from servicekit.errors import AccessRefused, BrokerUnavailable, SteplogError

RECENT = 60.0
"""Seconds after which a reason explains nothing any more: a client tries again every second."""

NO_LOGIN = re.compile("Authentication failed|Unsupported SASL mechanism")
NOT_TRUSTED = re.compile("certificate verify failed")
WE_ARE_NOT_TRUSTED = re.compile("alert .*(certificate|unknown ca)")
OTHER_PROTOCOL = re.compile("PLAINTEXT broker|closed by peer|not valid in current SASL state")


class ClientErrors:
    """What one client was told; `note` is its error_cb, and the client must be polled for it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._told = ""
        self._told_at = 0.0

    def note(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # follows the reason, and is none
            self._told = _reason(error.str())
            self._told_at = time.monotonic()

    def refusal(self) -> AccessRefused | None:
        """The reason for which trying again is of no use, if there is one."""
        told, bootstrap = self._recently_told(), self._connection.bootstrap
        if NO_LOGIN.search(told):
            return AccessRefused(
                f"{bootstrap} refuses the login: {told}; "
                "check sasl_mechanism, sasl_username and sasl_password"
            )
        if NOT_TRUSTED.search(told):
            return AccessRefused(
                f"the certificate of {bootstrap} cannot be verified; check that ssl_ca has signed "
                "it, and that bootstrap names the broker as the certificate does"
            )
        if WE_ARE_NOT_TRUSTED.search(told):
            return AccessRefused(
                f"{bootstrap} refuses our certificate, or that we have none; "
                "check ssl_certificate and ssl_key"
            )
        return None

    def failure(self, what: str, error: KafkaError, advice: str = "") -> SteplogError:
        """The error to raise when time is up: what did not happen, why, and what to do."""
        told = self._recently_told()
        # A broker that expects TLS, or a login, hangs up without a word.
        if not told or OTHER_PROTOCOL.search(told):
            protocol = self._connection.security_protocol
            advice = f"if a broker is there, check security_protocol, which is {protocol}"
        sentence = f"{what}: {told or error.str()}" + (f"; {advice}" if advice else "")
        return self.refusal() or BrokerUnavailable(sentence)

    def _recently_told(self) -> str:
        return self._told if time.monotonic() - self._told_at < RECENT else ""


def _reason(told: str) -> str:
    """Without the broker's address before it and the state of the connection after it."""
    return re.sub(r"^\S+: | \(after \d+ms in state .*", "", told)
