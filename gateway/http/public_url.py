"""The gateway's address as the client sees it, through whatever proxies."""

from gateway.http.exchange import Exchange

DEFAULT_PORTS = {"http": "80", "https": "443"}


def public_url(exchange: Exchange) -> str:
    header = exchange.header
    scheme = _first(header(b"x-forwarded-proto")) or exchange.scope["scheme"]
    host = _first(header(b"x-forwarded-host")) or header(b"host") or "127.0.0.1"
    port = _first(header(b"x-forwarded-port"))
    has_port = ":" in host.rpartition("]")[2]
    if port and not has_port and port != DEFAULT_PORTS.get(scheme):
        host = f"{host}:{port}"
    prefix = (_first(header(b"x-forwarded-prefix")) or "").strip("/")
    return f"{scheme}://{host}" + (f"/{prefix}" if prefix else "")


def _first(value: str | None) -> str | None:
    """The first value of a list to which each proxy may have appended its own: the client's."""
    return value.partition(",")[0].strip() if value else None
