"""The asyncio client."""

from __future__ import annotations

import asyncio
import concurrent.futures

import grpc
import grpc.aio

from . import errors, transport
from .call import Request
from .client import Client
from .transport import Cancellation, Exchange, Options, Retry


class AsyncClient:
    """Methods of Client as coroutines, of one event loop. Arguments, results and errors are
    Client's.

    A cancelled task cancels its call; there is no other cancellation. `timeout` counts connecting
    and waiting too. The first call connects; so do `async with` and connect(). RuntimeError:
    another event loop.

    Calls that are streamed, for large tensors, run on threads, at most max_streams at once:
    grpc.aio reports INTERNAL where a server refuses a stream that is still being sent.
    """

    def __init__(self, target: str = transport.DEFAULT_TARGET, *, max_streams: int = 16, **options):
        self._options = Options(target, **options)
        self._threads = concurrent.futures.ThreadPoolExecutor(max_streams, "attn_client")
        self._loop = None
        self._connecting = None  # the task that all first calls wait for
        self._client = None      # for all but unary calls
        self._channel = None     # for those
        self._methods = {}
        self._closing = None     # an asyncio.Event

    async def connect(self) -> AsyncClient:
        """Waits until the server answers, at most connect_timeout. Errors: as of Client()."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop, self._closing = loop, asyncio.Event()
        elif self._loop is not loop:
            raise RuntimeError("this AsyncClient belongs to another event loop")
        if self._closing.is_set():
            raise errors.closed()
        if self._client is None:
            if self._connecting is None:
                self._connecting = loop.create_task(self._connect())
                # Where it fails, the next call tries again; where nobody waits, nobody is told.
                self._connecting.add_done_callback(self._connected)
            try:
                # A cancelled waiter does not take the connection away from the others.
                await asyncio.shield(self._connecting)
            except asyncio.CancelledError:
                self._unless_closed()
                raise
        return self

    async def forward(self, q, k, v, *, timeout: float | None = None,
                      streaming: bool | None = None, traceparent: str | None = None, **arguments):
        """See Client.forward."""
        retry = Retry(self._options, timeout)
        request = Request("Forward", q, k, v, arguments)
        return await self._exchange(request, retry, streaming, traceparent)

    async def backward(self, q, k, v, out, lse, dout, dlse=None, *, timeout: float | None = None,
                       streaming: bool | None = None, traceparent: str | None = None, **arguments):
        """See Client.backward."""
        retry = Retry(self._options, timeout)
        gradients = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
        request = Request("Backward", q, k, v, arguments, gradients)
        return await self._exchange(request, retry, streaming, traceparent)

    async def plan(self, q, k, v, *, timeout: float | None = None, **arguments):
        """See Client.plan."""
        return await self._simple(Client.plan, timeout, q, k, v, **arguments)

    async def server_info(self, *, timeout: float | None = None):
        """See Client.server_info."""
        return await self._simple(Client.server_info, timeout)

    async def healthy(self, service: str = "", *, timeout: float | None = None) -> bool:
        """See Client.healthy."""
        return await self._simple(Client.healthy, timeout, service)

    async def close(self):
        """Ends calls that are under way, with CANCELLED."""
        if self._closing is None:
            self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        self._closing.set()
        if self._connecting is not None:
            self._connecting.cancel()
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

    async def _connect(self):
        def connect():
            client = Client(**vars(self._options))
            if self._closing.is_set():  # and nobody waits any more
                client.close()
            return client

        client = await self._loop.run_in_executor(self._threads, connect)
        self._channel = transport.channel(grpc.aio, self._options)
        self._client = client

    def _connected(self, task):
        self._connecting = None
        if not task.cancelled():
            task.exception()

    async def _ready(self, retry: Retry):
        if self._client is None:
            await self._within(retry.seconds_left(), self.connect())
        else:
            await self.connect()  # at once: another loop, or closed?

    async def _within(self, seconds_left, waiting):
        """What `waiting` gives, if it does before the deadline."""
        try:
            return await asyncio.wait_for(waiting, seconds_left)
        except asyncio.TimeoutError:
            raise transport.deadline_exceeded() from None

    async def _in_thread(self, retry: Retry, call):
        """call(cancellation) on a thread."""
        cancellation = Cancellation()
        try:
            return await self._within(retry.seconds_left(), self._loop.run_in_executor(
                self._threads, call, cancellation))
        except BaseException:
            cancellation.cancel()  # nothing, where it has ended
            raise

    async def _simple(self, method, timeout, *positional, **arguments):
        retry = Retry(self._options, timeout)
        await self._ready(retry)
        return await self._in_thread(retry, lambda cancellation: method(
            self._client, *positional, timeout=retry.seconds_left(), cancellation=cancellation,
            **arguments))

    async def _exchange(self, request, retry, streaming, traceparent):
        await self._ready(retry)
        exchange = Exchange(self._options, self._client.max_unary_bytes, request, streaming,
                            traceparent)
        if exchange.streaming:
            return await self._in_thread(
                retry, lambda cancellation: self._client.run(exchange, retry, cancellation))
        call = self._methods.get(exchange.method)
        if call is None:
            call = self._methods[exchange.method] = self._channel.unary_unary(exchange.method)
        while True:
            left = retry.begin()
            reply = exchange.begin()
            try:
                reply.read_unary(await call(exchange.message, timeout=left,
                                            metadata=exchange.metadata))
                return exchange.result(reply, retry.attempts)
            except asyncio.CancelledError:
                self._unless_closed()
                raise
            except grpc.RpcError as error:
                await self._wait(retry.delay_after(error))

    async def _wait(self, seconds: float):
        """Sleeps, until close()."""
        try:
            await asyncio.wait_for(self._closing.wait(), seconds)
        except asyncio.TimeoutError:
            return
        raise errors.closed()

    def _unless_closed(self):
        """After a CancelledError: close() cancels calls, not the tasks that wait for them."""
        task = asyncio.current_task()
        is_cancelled = hasattr(task, "cancelling") and task.cancelling() > 0  # from Python 3.11 on
        if self._closing.is_set() and not is_cancelled:
            raise errors.closed() from None
