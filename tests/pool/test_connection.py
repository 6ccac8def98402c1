"""Settings that cannot work are refused before anything is tried, and passwords stay hidden."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pool.connection import Connection
from tests.steplog.command import steplog

PASSWORD = "c0rrect-horse"
FILE = Path("file.pem")
LOGIN: dict[str, Any] = {
    "security_protocol": "SASL_SSL",
    "sasl_mechanism": "PLAIN",
    "sasl_username": "steplog",
    "sasl_password": PASSWORD,
}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"security_protocol": "SASL_SSL", "sasl_password": PASSWORD},
            "security_protocol SASL_SSL needs sasl_mechanism, sasl_username too",
        ),
        (
            {**LOGIN, "sasl_password": ""},
            "security_protocol SASL_SSL needs sasl_password too",
        ),
        (
            {**LOGIN, "security_protocol": "SSL"},
            "sasl_… settings are given, but security_protocol SSL has no login; "
            "set security_protocol to SASL_SSL or SASL_PLAINTEXT",
        ),
        (
            {"sasl_password": PASSWORD},
            "sasl_… settings are given, but security_protocol PLAINTEXT has no login; "
            "set security_protocol to SASL_SSL or SASL_PLAINTEXT",
        ),
        (
            {**LOGIN, "security_protocol": "SASL_PLAINTEXT", "ssl_ca": FILE},
            "ssl_… settings are given, but security_protocol SASL_PLAINTEXT has no TLS; "
            "set security_protocol to SSL or SASL_SSL",
        ),
        ({**LOGIN, "ssl_key": FILE}, "ssl_key needs ssl_certificate too"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(
    given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        Connection(**given)
    assert sentence in str(caught.value)
    assert PASSWORD not in str(caught.value)

    variables = {f"STEPLOG_{name.upper()}": str(value) for name, value in given.items()}
    done = steplog("topics", "check", **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"steplog: the settings of topics do not fit together: {sentence}\n"


def test_a_password_is_not_shown() -> None:
    connection = Connection(**LOGIN)
    for shown in (repr(connection), str(connection), connection.model_dump_json()):
        assert PASSWORD not in shown
    with pytest.raises(ValidationError) as caught:
        Connection(**{**LOGIN, "sasl_password": [PASSWORD]})
    assert PASSWORD not in str(caught.value)
