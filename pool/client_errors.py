"""Why a Kafka client cannot use the cluster, in words that name the setting to check.

A confluent-kafka client reports the reason to its `error_cb` and keeps trying; the call that waits
learns only that its time is up. `ClientErrors` remembers the reported reason for that call.
"""

import re
import time

from confluent_kafka import KafkaError

from pool.connection import Connection
from servicekit.errors import AccessRefused, BrokerUnavailable, SteplogError

RECENT_S = 60.0
"""Seconds after which a reason is outdated: a client tries again every second."""

LOGIN_REFUSED = re.compile("Authentication failed|Unsupported SASL mechanism")
BROKER_NOT_TRUSTED = re.compile("certificate verify failed")
CLIENT_NOT_TRUSTED = re.compile("alert .*(certificate|unknown ca)")
OTHER_PROTOCOL = re.compile("PLAINTEXT broker|closed by peer|not valid in current SASL state")


class ClientErrors:
    """The errors of one client. `record` is its error_cb; the client must be polled to call it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._reason = ""
        self._recorded_at = 0.0

    def record(self, error: KafkaError) -> None:
        # "All brokers are down" follows the actual reason and explains nothing.
        if error.code() != KafkaError._ALL_BROKERS_DOWN:
            self._reason = _strip_context(error.str())
            self._recorded_at = time.monotonic()

    def access_refusal(self) -> AccessRefused | None:
        """The error if access was refused, so that trying again is of no use."""
        reason, bootstrap = self._recent_reason(), self._connection.bootstrap
        if LOGIN_REFUSED.search(reason):
            return AccessRefused(
                f"{bootstrap} refuses the login: {reason}; "
                "check sasl_mechanism, sasl_username and sasl_password"
            )
        if BROKER_NOT_TRUSTED.search(reason):
            return AccessRefused(
                f"the certificate of {bootstrap} cannot be verified; check that ssl_ca has signed "
                "it, and that bootstrap names the broker as the certificate does"
            )
        if CLIENT_NOT_TRUSTED.search(reason):
            return AccessRefused(
                f"{bootstrap} refuses our certificate, or that we have none; "
                "check ssl_certificate and ssl_key"
            )
        return None

    def explain(self, failure: str, error: KafkaError, advice: str = "") -> SteplogError:
        """The error to raise when time is up: what did not happen, why, and what to do."""
        reason = self._recent_reason()
        # A broker that expects TLS, or a login, closes the connection without giving a reason.
        if not reason or OTHER_PROTOCOL.search(reason):
            protocol = self._connection.security_protocol
            advice = f"if a broker is there, check security_protocol, which is {protocol}"
        sentence = f"{failure}: {reason or error.str()}" + (f"; {advice}" if advice else "")
        return self.access_refusal() or BrokerUnavailable(sentence)

    def _recent_reason(self) -> str:
        return self._reason if time.monotonic() - self._recorded_at < RECENT_S else ""


def _strip_context(text: str) -> str:
    """Without the broker's address before the reason and the connection's state after it."""
    return re.sub(r"^\S+: | \(after \d+ms in state .*", "", text)
