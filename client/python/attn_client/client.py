"""The blocking client."""

from __future__ import annotations

import time

import grpc

from . import schema, transport
from .call import Request, plan_request
from .transport import Cancellation, Exchange, Retry, method


class Client:
    """Calls one attnd. Thread-safe. Options: see transport.Options.

    The constructor asks the server for its limits, and keeps them. Errors: AttentionError
    (UNAVAILABLE or DEADLINE_EXCEEDED: no server answered within connect_timeout), ValueError,
    OSError (a PEM file).
    """

    def __init__(self, target: str = "127.0.0.1:50051", **options):
        self._options = transport.Options(target, **options)
        self._channel = transport.channel(grpc, self._options)
        self._methods = {}  # made once: that takes as long as sending
        try:
            info = self._simple(method("GetServerInfo"), b"", self._options.connect_timeout, None,
                                wait_for_ready=True)
            self._limits = schema.GetServerInfoResponse.FromString(info).limits
        except BaseException:
            self._channel.close()
            raise

    def forward(self, q, k, v, *, timeout: float | None = None, streaming: bool | None = None,
                traceparent: str | None = None, cancellation: Cancellation | None = None,
                **arguments):
        """out and lse: a ForwardResult. Arguments: see the README.

        q: [batch, seqlen_q, num_heads, head_dim]; k: [batch, seqlen_k, num_kv_heads, head_dim]; v: as
        k with head_dim_v. float32, float16 or bfloat16, alike in all three. With cu_seqlens_q and
        cu_seqlens_k: [total tokens, heads, dim]. timeout: seconds, retries included. streaming: None
        chooses by size. Errors: AttentionError; TypeError and ValueError for what cannot be sent.
        """
        request = Request("Forward", q, k, v, **arguments)
        return self._exchange(request, timeout, streaming, traceparent, cancellation)

    def backward(self, q, k, v, out, lse, dout, dlse=None, *, timeout: float | None = None,
                 streaming: bool | None = None, traceparent: str | None = None,
                 cancellation: Cancellation | None = None, **arguments):
        """Gradients: a BackwardResult. Arguments as of the forward call, dropout's seed included.

        out, lse: as forward() returned them. dout: like out. dlse: like lse, None: 0.
        """
        gradients = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
        request = Request("Backward", q, k, v, gradients=gradients, **arguments)
        return self._exchange(request, timeout, streaming, traceparent, cancellation)

    def plan(self, q, k, v, *, timeout: float | None = None,
             cancellation: Cancellation | None = None, **arguments):
        """Which path a call would take and why, and its cost: a schema.PlanResponse.

        q, k, v: arrays, or Spec(shape, dtype). pass_: "forward" or "backward".
        """
        request = plan_request(q, k, v, **arguments)
        return schema.PlanResponse.FromString(
            self._simple(method("Plan"), request, timeout, cancellation))

    def server_info(self, *, timeout: float | None = None,
                    cancellation: Cancellation | None = None):
        """Version, devices, paths and limits: a schema.GetServerInfoResponse."""
        return schema.GetServerInfoResponse.FromString(
            self._simple(method("GetServerInfo"), b"", timeout, cancellation))

    def healthy(self, service: str = "", *, timeout: float | None = None,
                cancellation: Cancellation | None = None) -> bool:
        """grpc.health.v1: whether the server is SERVING."""
        return transport.is_serving(self._simple(
            transport.HEALTH_CHECK, transport.health_request(service), timeout, cancellation))

    def close(self):
        """Ends calls that are under way."""
        self._channel.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _simple(self, name, request: bytes, timeout, cancellation, wait_for_ready=None) -> bytes:
        """A unary call of few bytes."""
        def attempt(left, _):
            return self._unary(name, request, cancellation, timeout=left,
                               wait_for_ready=wait_for_ready)

        return self._with_retries(attempt, timeout, cancellation)

    def _exchange(self, request, timeout, streaming, traceparent, cancellation):
        exchange = Exchange(self._options, self._limits, request, streaming, traceparent)
        return self._run(exchange, timeout, cancellation)

    def _run(self, exchange: Exchange, timeout, cancellation):
        def attempt(left, attempts):
            reply = exchange.begin()
            if exchange.streaming:
                self._stream(exchange, reply, cancellation, left)
            else:
                reply.read_unary(self._unary(exchange.method, exchange.message, cancellation,
                                             timeout=left, metadata=exchange.metadata))
            return exchange.result(reply, attempts)

        return self._with_retries(attempt, timeout, cancellation)

    def _with_retries(self, attempt, timeout, cancellation):
        """attempt(seconds left, attempts so far) until it succeeds."""
        retry = Retry(self._options.max_retries, timeout)
        wait = time.sleep if cancellation is None else cancellation.wait
        if cancellation is not None:
            cancellation.wait(0)
        while True:
            left = retry.begin()
            try:
                return attempt(left, retry.attempts)
            except grpc.RpcError as error:
                wait(retry.delay_after(error))

    def _unary(self, name, message: bytes, cancellation, **options) -> bytes:
        call = self._methods.get(name)
        if call is None:
            call = self._methods[name] = self._channel.unary_unary(name)
        if cancellation is None:
            return call(message, **options)
        future = call.future(message, **options)
        cancellation.watch(future)
        try:
            return future.result()
        except grpc.FutureCancelledError:
            raise future from None  # an RpcError too, with code CANCELLED

    def _stream(self, exchange, reply, cancellation, left):
        call = self._channel.stream_stream(exchange.method)(
            exchange.messages(), timeout=left, metadata=exchange.metadata)
        if cancellation is not None:
            cancellation.watch(call)
        try:
            for message in call:
                reply.read_stream(message)
        finally:
            call.cancel()  # nothing, where it has ended
