"""The asyncio client."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools

import grpc
import grpc.aio

from . import transport
from .call import Request
from .client import Client
from .transport import Cancellation, Exchange, Options, Retry


class AsyncClient:
    """Methods of Client as coroutines, of one event loop. Arguments, results and errors are Client's.

    A cancelled task cancels its call. The first call connects; so do `async with` and connect().

    Calls that are streamed, for large tensors, run on threads, at most max_streams at once: grpc.aio
    reports INTERNAL where a server refuses a stream that is still being sent.
    """

    def __init__(self, target: str = "127.0.0.1:50051", *, max_streams: int = 16, **options):
        self._options = Options(target, **options)
        self._threads = concurrent.futures.ThreadPoolExecutor(max_streams, "attn_client")
        self._connecting = asyncio.Lock()
        self._client = None   # for all but unary calls
        self._channel = None  # for those
        self._methods = {}

    async def connect(self) -> AsyncClient:
        async with self._connecting:
            if self._client is None:
                connect = functools.partial(Client, **vars(self._options))
                loop = asyncio.get_running_loop()
                self._client = await loop.run_in_executor(self._threads, connect)
                self._channel = transport.channel(grpc.aio, self._options)
        return self

    async def forward(self, q, k, v, *, timeout: float | None = None,
                      streaming: bool | None = None, traceparent: str | None = None, **arguments):
        """See Client.forward."""
        request = Request("Forward", q, k, v, **arguments)
        return await self._exchange(request, timeout, streaming, traceparent)

    async def backward(self, q, k, v, out, lse, dout, dlse=None, *, timeout: float | None = None,
                       streaming: bool | None = None, traceparent: str | None = None, **arguments):
        """See Client.backward."""
        gradients = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
        request = Request("Backward", q, k, v, gradients=gradients, **arguments)
        return await self._exchange(request, timeout, streaming, traceparent)

    async def plan(self, q, k, v, **arguments):
        """See Client.plan."""
        return await self._in_thread(Client.plan, q, k, v, **arguments)

    async def server_info(self, **arguments):
        """See Client.server_info."""
        return await self._in_thread(Client.server_info, **arguments)

    async def healthy(self, service: str = "", **arguments) -> bool:
        """See Client.healthy."""
        return await self._in_thread(Client.healthy, service, **arguments)

    async def close(self):
        """Ends calls that are under way."""
        if self._client is not None:
            self._client.close()
            await self._channel.close()
        self._threads.shutdown(wait=False)

    async def __aenter__(self):
        try:
            return await self.connect()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(self, *_):
        await self.close()

    async def _in_thread(self, method, *positional, **arguments):
        await self.connect()
        cancellation = Cancellation()
        call = functools.partial(method, self._client, *positional, cancellation=cancellation,
                                 **arguments)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise

    async def _exchange(self, request, timeout, streaming, traceparent):
        await self.connect()
        exchange = Exchange(self._options, self._client._limits, request, streaming, traceparent)
        if exchange.streaming:
            return await self._in_thread(Client._run, exchange, timeout)
        call = self._methods.get(exchange.method)
        if call is None:
            call = self._methods[exchange.method] = self._channel.unary_unary(exchange.method)
        retry = Retry(self._options.max_retries, timeout)
        while True:
            left = retry.begin()
            reply = exchange.begin()
            try:
                reply.read_unary(await call(exchange.message, timeout=left,
                                            metadata=exchange.metadata))
                return exchange.result(reply, retry.attempts)
            except grpc.RpcError as error:
                await asyncio.sleep(retry.delay_after(error))
