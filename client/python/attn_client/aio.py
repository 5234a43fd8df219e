"""The asyncio client."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools

from .client import Client
from .transport import Cancellation


class AsyncClient:
    """Methods of Client as coroutines. Arguments, results and errors are those of Client.

    Calls run on threads of their own, so that neither the network nor the encoding of large tensors
    waits in the event loop. (Nor does it meet grpc.aio, which reports INTERNAL where a server refuses
    a stream that is still being sent.) At most max_concurrency calls are under way, further ones wait.
    A cancelled task cancels its call. The first call connects; so do `async with` and connect().
    """

    def __init__(self, target: str = "127.0.0.1:50051", *, max_concurrency: int = 64, **options):
        self._connect = functools.partial(Client, target, **options)
        self._pool = concurrent.futures.ThreadPoolExecutor(max_concurrency, "attn_client")
        self._client = None
        self._connecting = asyncio.Lock()

    async def connect(self) -> AsyncClient:
        async with self._connecting:
            if self._client is None:
                loop = asyncio.get_running_loop()
                self._client = await loop.run_in_executor(self._pool, self._connect)
        return self

    async def forward(self, *tensors, **arguments):
        """See Client.forward."""
        return await self._run(Client.forward, tensors, arguments)

    async def backward(self, *tensors, **arguments):
        """See Client.backward."""
        return await self._run(Client.backward, tensors, arguments)

    async def plan(self, *tensors, **arguments):
        """See Client.plan."""
        return await self._run(Client.plan, tensors, arguments)

    async def server_info(self, **arguments):
        """See Client.server_info."""
        return await self._run(Client.server_info, (), arguments)

    async def healthy(self, service: str = "", **arguments) -> bool:
        """See Client.healthy."""
        return await self._run(Client.healthy, (service,), arguments)

    async def close(self):
        """Ends calls that are under way."""
        if self._client is not None:
            self._client.close()
        self._pool.shutdown(wait=False)

    async def __aenter__(self):
        try:
            return await self.connect()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(self, *_):
        await self.close()

    async def _run(self, method, tensors, arguments):
        await self.connect()
        cancellation = Cancellation()
        call = functools.partial(method, self._client, *tensors, cancellation=cancellation,
                                 **arguments)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, call)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise
