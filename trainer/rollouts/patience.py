"""A transport for agents' HTTP clients that waits for a gateway that is away."""

from __future__ import annotations

import asyncio
import ssl
import time
import uuid

import httpx

from services.core.tasks import Stopwatch
from services.protocol.sessions import AGAIN, REQUEST_MARK

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
_AWAY = frozenset({502, 503, 504})
_LOST = (httpx.NetworkError, httpx.ConnectTimeout, httpx.RemoteProtocolError)


class PatientTransport(httpx.AsyncHTTPTransport):
    """A transport that sends a request again while nobody answers it.

    All attempts have the same mark, by which the gateway knows them from another request with the same body.

    The client of OpenAI's package gives up after three attempts and two seconds, in which no gateway restarts. An
    answer is passed on once it is whole.
    """

    def __init__(self, certificates: ssl.SSLContext, seconds: float, waits: Stopwatch) -> None:
        """Make a transport that gives up ``seconds`` after a request's first attempt; ``waits`` runs meanwhile."""
        super().__init__(verify=certificates, trust_env=False)
        self._seconds = seconds
        self._waits = waits
        self.is_lost = False
        """True once a request was given up."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the answer to a request; without one in time, the last one, or raise the last error."""
        with self._waits.running():
            return await self._answer(request)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        mark = request.headers[REQUEST_MARK] = uuid.uuid4().hex
        end, pause = time.monotonic() + self._seconds, FIRST_PAUSE_SECONDS
        while True:
            may_repeat = isinstance(request.stream, httpx.ByteStream) and time.monotonic() < end
            try:
                response = await self._whole(request)
            except _LOST:
                if not may_repeat:
                    self.is_lost = True
                    raise
            else:
                if response.status_code not in _AWAY or not may_repeat:
                    self.is_lost |= response.status_code in _AWAY
                    return response
            request.headers[REQUEST_MARK] = mark + AGAIN
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _whole(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        try:
            body = b"".join([part async for part in response.stream])
        finally:
            await response.aclose()
        return httpx.Response(response.status_code, headers=response.headers, stream=httpx.ByteStream(body))
