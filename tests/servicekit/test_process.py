"""What every process has in common."""

import os
import signal
import socket
from collections.abc import Iterator

import pytest
from pydantic import BaseModel, SecretStr

from pool.connection import Connection
from servicekit.errors import Fatal
from servicekit.masking import format_settings, mask_settings
from servicekit.process import listen, stop_on_signals


@pytest.fixture
def handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_settings_are_shown_without_secrets() -> None:
    shown = format_settings(
        Connection(
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism="PLAIN",
            sasl_username="steplog",
            sasl_password=SecretStr("geheim"),
            registry_url="https://me:geheim@registry:8081/x",
        )
    )
    assert "\n" not in shown and "geheim" not in shown
    assert "bootstrap=127.0.0.1:9092 " in shown and "sasl_password=****" in shown
    assert "registry_url=https://***@registry:8081/x" in shown


def test_urls_in_a_list_are_shown_without_their_login() -> None:
    class Judges(BaseModel):
        urls: tuple[str, ...] = ("http://me:geheim@judge/v1", "http://plain/v1")
        count: int = 2

    assert mask_settings(Judges()) == {
        "urls": ["http://***@judge/v1", "http://plain/v1"],
        "count": 2,
    }


def test_a_port_in_use_is_one_sentence() -> None:
    with listen("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(Fatal, match=rf"Cannot listen on 127.0.0.1:{port}: .*; choose another"):
            listen("127.0.0.1", port)


def test_processes_may_share_a_port() -> None:
    with listen("127.0.0.1", 0, reuse_port=True) as first:
        first.listen()
        with listen("127.0.0.1", first.getsockname()[1], reuse_port=True) as second:
            assert second.getsockname() == first.getsockname()


def test_it_listens_on_ipv6() -> None:
    with listen("::1", 0) as listener:
        assert listener.family == socket.AF_INET6


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_ask_it_to_stop(handlers: None, number: signal.Signals) -> None:
    stop = stop_on_signals()
    assert not stop.is_set()
    os.kill(os.getpid(), number)
    assert stop.wait(60)
