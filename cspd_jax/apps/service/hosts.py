"""Which names a request may give: a page of a stranger can have its own name mean this machine."""

from __future__ import annotations

import fnmatch
import ipaddress
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit


def refusal(headers: Mapping[bytes, bytes], allowed: Sequence[str]) -> str | None:
    """Why a request is not answered, for the names that it gives; None for one that is.

    A Host that is a name must be localhost or allowed; an address cannot be made to mean another. What a
    page of another origin asks is refused, too.

    allowed: names, in which * stands for any characters.
    """
    told = headers.get(b"host")
    host = None if told is None else _host(told.decode("latin-1"))
    if told is not None and not _is_known(host, allowed):
        return f"this service does not answer for the host {host!r:.80}; --allow-host lets it"
    origin = headers.get(b"origin")
    if origin is not None:
        page = _host(origin.decode("latin-1").rpartition("//")[2])
        if page != host and not _matches(page, allowed):
            return f"this service does not answer pages of {page!r:.80}; --allow-host lets it"
    return None


def _host(authority: str) -> str:
    """The name or address before the port, in lower case; "" for what is none."""
    try:
        return (urlsplit(f"//{authority}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_known(host: str | None, allowed: Sequence[str]) -> bool:
    if not host:
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or _matches(host, allowed)
    return True


def _matches(host: str, allowed: Sequence[str]) -> bool:
    return bool(host) and any(fnmatch.fnmatchcase(host, name.lower()) for name in allowed)
