"""Connections whose requests come soon, or are closed, and a server that ends with an answer to all of them.
Needs the extra `demo`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

SLOWEST_HEADERS = 10.0  # seconds
_TO_BE_TOLD = 0.3  # seconds until pages, which look now and then, have told of the end
_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Punctual(H11Protocol):
    """A connection that is closed if the headers of a request do not come in time."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Until the headers are there; between two requests uvicorn's own limit counts."""
        if self.conn.their_state is not h11.IDLE:
            self._unwatch()
        elif self._late is None:
            self._late = self.loop.call_later(SLOWEST_HEADERS, self._give_up)

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.write(_LATE)
            self.transport.close()


class PoliteServer(uvicorn.Server):
    """A server that has its requests end before it waits for them.

    end_requests: gives every request an end, within seconds; called in a thread.
    end_streams: closes connections that would never end; called after that.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        end_requests: Callable[[], object],
        end_streams: Callable[[], object],
    ):
        super().__init__(config)
        self._end_requests, self._end_streams = end_requests, end_streams

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._end_requests)
        await asyncio.sleep(_TO_BE_TOLD)
        self._end_streams()
        await super().shutdown(sockets)
