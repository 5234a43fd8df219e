"""attn_client, the Python client, against servers that answer wrongly, late or not at all."""

import asyncio
import concurrent.futures
import socket
import threading
import time
import unittest

import attn_client
import grpc
import numpy as np
from attn_client import AttentionError, schema, transport
from grpc import StatusCode

from harness import contract
from harness.contract import pb, tensor

T = contract.TIMEOUT_S
Q = np.arange(2 * 3 * 1 * 4, dtype=np.float32).reshape(2, 3, 1, 4)


class FakeServer(grpc.GenericRpcHandler):
    """Answers each method of attention.v1 with what `replies` has for it: a callable of the context
    that returns bytes (or a list of them, for a stream), one for each attempt, the last one
    again."""

    def __init__(self):
        self.replies = {"GetServerInfo": [lambda _: b""]}
        self.calls = []
        self.lock = threading.Lock()
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), handlers=[self])
        self.target = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self):
        self.server.start()
        return self

    def __exit__(self, *_):
        self.server.stop(None).wait()

    def service(self, details):
        method = details.method.rpartition("/")[2]
        if method not in self.replies:
            return None

        def answer(_, context):
            with self.lock:
                attempt = self.calls.count(method)
                self.calls.append(method)
            replies = self.replies[method]
            return replies[min(attempt, len(replies) - 1)](context)

        def answer_stream(requests, context):
            for _ in requests:
                pass
            yield from answer(None, context)

        if method.endswith("Stream"):
            return grpc.stream_stream_rpc_method_handler(answer_stream)
        return grpc.unary_unary_rpc_method_handler(answer)


def good_header(**changes):
    header = pb.ForwardResponseHeader(out=tensor(pb.DTYPE_FP32, Q.shape, 0),
                                      lse=tensor(pb.DTYPE_FP32, (2, 1, 3), 1))
    for name, value in changes.items():
        getattr(header, name).CopyFrom(value)
    return header


OUT, LSE = Q.tobytes(), np.zeros((2, 1, 3), np.float32).tobytes()
REPORT = pb.ExecutionReport(path="flash_cpu", kernel="made_up")


def unary(header=None, payloads=(OUT, LSE), report=REPORT):
    """A reply; without a report where that is None."""
    return pb.ForwardResponse(header=header or good_header(), payload=payloads,
                              report=report).SerializeToString()


def chunk(index, offset, data):
    return pb.ForwardStreamResponse(
        chunk=pb.PayloadChunk(payload_index=index, offset=offset, data=data)).SerializeToString()


HEADER = pb.ForwardStreamResponse(header=good_header()).SerializeToString()
END = pb.ForwardStreamResponse(report=REPORT).SerializeToString()
STREAM = [HEADER, chunk(1, 0, LSE), chunk(0, 0, OUT[:40]), chunk(0, 40, OUT[40:]), END]


def abort(code, details="made up", pushback=None):
    def answer(context):
        if pushback is not None:
            context.set_trailing_metadata((("grpc-retry-pushback-ms", pushback),))
        context.abort(code, details)
    return answer


def always(reply):
    return [lambda _: reply]


class PythonClientFaultsTest(unittest.TestCase):
    def setUp(self):
        self.fake = self.enterContext(FakeServer())

    def client(self, **options):
        return self.enterContext(attn_client.Client(self.fake.target, **options))

    def forward(self, streaming, use_asyncio=False, **options):
        """A forward call of Q, by either client, with what is set as replies."""
        if not use_asyncio:
            return self.client(**options).forward(Q, Q, Q, streaming=streaming, timeout=T)

        async def run():
            async with attn_client.AsyncClient(self.fake.target, **options) as client:
                return await client.forward(Q, Q, Q, streaming=streaming, timeout=T)

        return asyncio.run(run())

    def fails(self, code, words, *args, **kwargs):
        with self.assertRaises(AttentionError) as caught:
            self.forward(*args, **kwargs)
        self.assertEqual(caught.exception.code, code)
        self.assertIn(words, caught.exception.details)

    def test_whole_replies(self):
        self.fake.replies["Forward"] = always(unary())
        self.fake.replies["ForwardStream"] = always(STREAM)
        for streaming in (False, True):
            for use_asyncio in (False, True):
                found = self.forward(streaming, use_asyncio)
                np.testing.assert_array_equal(found.out, Q)
                self.assertEqual((found.path, found.streamed), ("flash_cpu", streaming))

    def test_unary_replies_as_protobuf_may_write_them(self):
        """Header and report in parts, unknown fields of every wire type, lengths longer than
        needed."""
        whole = good_header().SerializeToString()
        unknown = b"\x78\xff\x01" + b"\x79" + bytes(8) + b"\x7d" + bytes(4) + b"\x7a\x01x"
        first = pb.ForwardResponseHeader(out=good_header().out).SerializeToString()
        second = pb.ForwardResponseHeader(lse=good_header().lse).SerializeToString()
        self.assertEqual(len(first) + len(second), len(whole))
        report = REPORT.SerializeToString()
        message = (b"\x12\x60" + OUT + unknown + b"\x0a" + bytes([len(first)]) + first +
                   b"\x1a" + bytes([len(report)]) + report + b"\x12\x98\x80\x00" + LSE +
                   b"\x0a" + bytes([len(second)]) + second + unknown)
        self.assertEqual((len(OUT), len(LSE)), (0x60, 0x18))
        self.fake.replies["Forward"] = always(message)
        found = self.forward(False)
        np.testing.assert_array_equal(found.out, Q)
        self.assertEqual(found.report.kernel, "made_up")

    def test_unary_replies_that_are_not_whole_are_internal(self):
        fp16 = tensor(pb.DTYPE_FP16, Q.shape, 0)
        for words, reply in (
                ("out is UNSPECIFIED []", b""),
                ("out is FP16", unary(good_header(out=fp16))),
                ("lse is FP32 [2, 3, 1]",
                 unary(good_header(lse=tensor(pb.DTYPE_FP32, (2, 3, 1), 1)))),
                ("lse is not a contiguous payload of its own",
                 unary(good_header(lse=tensor(pb.DTYPE_FP32, (2, 1, 3), 0)))),
                ("out is not a contiguous payload of its own",
                 unary(good_header(out=tensor(pb.DTYPE_FP32, Q.shape, 0, (12, 4, 4, 1))))),
                ("0 of 24 B of lse", unary(payloads=(OUT,))),
                ("0 of 96 B of out", unary(payloads=(b"", LSE))),
                ("92 of 96 B of out", unary(payloads=(OUT[:-4], LSE))),
                ("100 B at 0 of payload 0", unary(payloads=(OUT + LSE[:4], LSE))),
                ("payload 2, which belongs to no tensor", unary(payloads=(OUT, LSE, b"x"))),
                ("a field of 96 B at byte", unary()[:60]),
                ("wire type 3", b"\x0b"),
                ("it has no report", unary(report=None)),
                # Of another wire type a field is unknown.
                ("out is UNSPECIFIED []", b"\x08\x01" + unary()[len(HEADER):]),
                ("it has no report", unary(report=None) + b"\x18\x03"),
                ("out is 77 []", unary(pb.ForwardResponseHeader(out=pb.Tensor(dtype=77)))),
                ("does not end", b"\x0a\xff\xff\xff"),
                ("does not end", b"\x0a" + b"\xff" * 11),
                ("ForwardResponseHeader", b"\x0a\x02\x0a\x7f"),
                ("ExecutionReport", unary() + b"\x1a\x02\x22\x7f")):
            self.fake.replies["Forward"] = always(reply)
            for use_asyncio in (False, True):
                with self.subTest(words, asyncio=use_asyncio):
                    self.fails(StatusCode.INTERNAL, words, False, use_asyncio)

    def test_streams_that_are_not_whole_are_internal(self):
        for words, reply in (
                ("it has no header", []),
                ("it has no report", STREAM[:-1]),
                ("a chunk before the header", STREAM[1:]),
                ("a report before the header", [END]),
                ("two headers", [HEADER, *STREAM]),
                ("a chunk after the report", [*STREAM, STREAM[1]]),
                ("a report after the report", [*STREAM, END]),
                ("40 of 96 B of out", [*STREAM[:3], END]),
                ("56 B at 40 of payload 0, of which 0", [HEADER, STREAM[3], STREAM[2], END]),
                ("40 B at 0 of payload 0, of which 40", [*STREAM[:3], *STREAM[2:]]),
                ("payload 5, which belongs to no tensor", [HEADER, chunk(5, 0, b"x"), END]),
                ("a part that is known", [b"\x08" + b"\xff" * 6 + b"\x01"]),
                ("a part that is known", [HEADER, b"\x18\x03"]),
                ("0 of 96 B of out", [HEADER, b"\x12\x04\x08\x01\x18\x05", END]),
                ("a part that is known", [b"\x22\x00"])):
            self.fake.replies["ForwardStream"] = always(reply)
            for use_asyncio in (False, True):
                with self.subTest(words, asyncio=use_asyncio):
                    self.fails(StatusCode.INTERNAL, words, True, use_asyncio)

    def test_unavailable_is_tried_again(self):
        for streaming, good in ((False, unary()), (True, STREAM)):
            method = "ForwardStream" if streaming else "Forward"
            for use_asyncio in (False, True):
                self.fake.calls.clear()
                self.fake.replies[method] = [abort(StatusCode.UNAVAILABLE)] * 2 + always(good)
                found = self.forward(streaming, use_asyncio)
                self.assertEqual(found.attempts, 3)
                np.testing.assert_array_equal(found.out, Q)

    def test_a_stream_that_breaks_is_begun_anew(self):
        def breaks(context):
            yield from STREAM[:3]
            context.abort(StatusCode.UNAVAILABLE, "made up")

        self.fake.replies["ForwardStream"] = [breaks] + always(STREAM)
        found = self.forward(True)
        self.assertEqual(found.attempts, 2)
        np.testing.assert_array_equal(found.out, Q)

    def test_pushback_is_waited_for(self):
        self.fake.replies["Forward"] = [abort(StatusCode.RESOURCE_EXHAUSTED, pushback="300"),
                                        *always(unary())]
        start = time.monotonic()
        self.assertEqual(self.forward(False).attempts, 2)
        self.assertGreaterEqual(time.monotonic() - start, 0.3)

    def test_what_is_not_tried_again(self):
        for code, pushback, attempts in (
                (StatusCode.RESOURCE_EXHAUSTED, None, 1), (StatusCode.RESOURCE_EXHAUSTED, "-1", 1),
                (StatusCode.RESOURCE_EXHAUSTED, "soon", 1), (StatusCode.INTERNAL, "1", 1),
                (StatusCode.INVALID_ARGUMENT, None, 1), (StatusCode.UNAVAILABLE, "1", 3)):
            with self.subTest(code=code, pushback=pushback):
                self.fake.calls.clear()
                self.fake.replies["Forward"] = [abort(code, "no", pushback)]
                self.fails(code, "no", False, max_retries=2)
                self.assertEqual(self.fake.calls.count("Forward"), attempts)

    def test_a_wait_that_reaches_the_deadline_is_not_begun(self):
        self.fake.replies["Forward"] = [abort(StatusCode.RESOURCE_EXHAUSTED, "full", "60000")]
        start = time.monotonic()
        with self.assertRaises(AttentionError) as caught:
            self.client().forward(Q, Q, Q, timeout=20)
        self.assertEqual(caught.exception.code, StatusCode.RESOURCE_EXHAUSTED)
        self.assertLess(time.monotonic() - start, 15)

    def test_cancellation_from_another_thread(self):
        arrived, release = threading.Event(), threading.Event()
        self.addCleanup(release.set)

        def hang(context):
            arrived.set()
            release.wait(T)
            context.abort(StatusCode.UNAVAILABLE, "released")

        def hang_stream(context):
            hang(context)
            yield b""

        self.fake.replies["Forward"] = [hang]
        self.fake.replies["ForwardStream"] = [hang_stream]
        client = self.client()
        for streaming in (False, True):
            arrived.clear()
            cancellation = attn_client.Cancellation()
            thread = threading.Thread(target=lambda: (arrived.wait(T), cancellation.cancel()))
            thread.start()
            with self.assertRaises(AttentionError) as caught:
                client.forward(Q, Q, Q, streaming=streaming, cancellation=cancellation)
            self.assertEqual(caught.exception.code, StatusCode.CANCELLED)
            thread.join()

    def test_cancellation_before_the_call_and_between_attempts(self):
        cancellation = attn_client.Cancellation()
        cancellation.cancel()
        with self.assertRaises(AttentionError) as caught:
            self.client().forward(Q, Q, Q, cancellation=cancellation)
        self.assertEqual(caught.exception.code, StatusCode.CANCELLED)
        self.assertNotIn("Forward", self.fake.calls)

        cancellation = attn_client.Cancellation()
        timer = threading.Timer(0.2, cancellation.cancel)

        def push_back(context):
            timer.start()
            abort(StatusCode.RESOURCE_EXHAUSTED, "full", "600000")(context)

        self.fake.replies["Forward"] = [push_back]
        start = time.monotonic()
        with self.assertRaises(AttentionError) as caught:
            self.client().forward(Q, Q, Q, cancellation=cancellation)
        self.assertEqual(caught.exception.code, StatusCode.CANCELLED)
        self.assertLess(time.monotonic() - start, T)

    def test_close_ends_a_call_that_waits_for_its_next_attempt(self):
        arrived = threading.Event()

        def push_back(context):
            arrived.set()
            abort(StatusCode.RESOURCE_EXHAUSTED, "full", "600000")(context)

        self.fake.replies["Forward"] = self.fake.replies["ForwardStream"] = [push_back]
        start = time.monotonic()
        for streaming in (False, True):
            client = self.client()
            arrived.clear()
            thread = threading.Thread(target=lambda: (arrived.wait(T), time.sleep(0.1),
                                                      client.close()))
            thread.start()
            with self.assertRaises(AttentionError) as caught:
                client.forward(Q, Q, Q, streaming=streaming)
            self.assertEqual(str(caught.exception)[:9], "CANCELLED")
            thread.join()
            with self.assertRaises(AttentionError) as caught:
                client.forward(Q, Q, Q, streaming=streaming)
            self.assertEqual(caught.exception.details, "the client is closed")

            async def run():
                arrived.clear()
                client = await attn_client.AsyncClient(self.fake.target).connect()
                call = asyncio.ensure_future(client.forward(Q, Q, Q, streaming=streaming))
                await asyncio.to_thread(arrived.wait, T)
                await asyncio.sleep(0.1)
                await client.close()
                for waiting in (call, client.forward(Q, Q, Q), client.connect()):
                    with self.assertRaises(AttentionError) as caught:
                        await waiting
                    self.assertEqual(caught.exception.code, StatusCode.CANCELLED)

            asyncio.run(run())
        self.assertLess(time.monotonic() - start, T)

    def test_close_ends_a_call_that_runs(self):
        release = threading.Event()
        self.addCleanup(release.set)
        self.fake.replies["Forward"] = [lambda context: release.wait(T) and b""]

        async def run():
            client = await attn_client.AsyncClient(self.fake.target).connect()
            call = asyncio.ensure_future(client.forward(Q, Q, Q))
            while "Forward" not in self.fake.calls:
                await asyncio.sleep(0.01)
            await client.close()
            with self.assertRaises(AttentionError) as caught:
                await call
            self.assertEqual(caught.exception.details, "the client is closed")

        asyncio.run(run())

    def test_an_asyncio_timeout_counts_connecting(self):
        """Of a server that accepts connections and says nothing; 20 calls at once, and again."""
        silent = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(silent.close)

        async def run():
            client = attn_client.AsyncClient(f"127.0.0.1:{silent.getsockname()[1]}",
                                             connect_timeout=1.0)
            for _ in range(2):
                errors = await asyncio.gather(
                    *(client.forward(Q, Q, Q, timeout=0.2) for _ in range(20)), client.healthy(),
                    return_exceptions=True)
                self.assertEqual([e.code for e in errors[:-1]], [StatusCode.DEADLINE_EXCEEDED] * 20)
                self.assertIn("no answer from", errors[-1].details)
            waiting = asyncio.ensure_future(client.forward(Q, Q, Q))
            await asyncio.sleep(0.05)
            await client.close()
            with self.assertRaises(AttentionError) as caught:
                await waiting
            self.assertEqual(caught.exception.details, "the client is closed")

        start = time.monotonic()
        asyncio.run(run())
        self.assertLess(time.monotonic() - start, T)

    def test_first_calls_share_one_connection(self):
        self.fake.replies["Forward"] = always(unary())

        async def run():
            async with attn_client.AsyncClient(self.fake.target) as client:
                pass
            client = attn_client.AsyncClient(self.fake.target)
            first = asyncio.ensure_future(client.forward(Q, Q, Q))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.gather(*(client.forward(Q, Q, Q) for _ in range(8)))
            self.assertTrue(first.cancelled())
            return client

        client = asyncio.run(run())
        self.assertEqual(self.fake.calls.count("GetServerInfo"), 2)
        with self.assertRaisesRegex(RuntimeError, "belongs to another event loop"):
            asyncio.run(client.forward(Q, Q, Q))

    def test_what_newer_servers_may_say(self):
        report = pb.ExecutionReport(path="p", rejections=[pb.Rejection(path="x", reason=99)])
        self.fake.replies["Forward"] = always(unary(report=report))
        self.assertEqual(self.forward(False).rejections, [("x", "99", "")])

    def test_garbage_for_what_is_not_attention(self):
        client = self.client()
        for method in ("GetServerInfo", "Plan"):
            self.fake.replies[method] = always(b"\x0a\x7f")
        for call in (client.server_info, lambda: client.plan(Q, Q, Q), self.client):
            with self.assertRaises(AttentionError) as caught:
                call()
            self.assertEqual(caught.exception.code, StatusCode.INTERNAL)

    def test_a_tripped_client_can_be_used_again(self):
        self.fake.replies["Forward"] = [lambda _: b"\x0b", *always(unary())]
        client = self.client()
        with self.assertRaises(AttentionError):
            client.forward(Q, Q, Q)
        np.testing.assert_array_equal(client.forward(Q, Q, Q).out, Q)

    def test_retry_delays(self):
        code = StatusCode.UNAVAILABLE
        delays = [transport.retry_delay(code, None, n, 99, 0.999999) for n in range(1, 9)]
        np.testing.assert_allclose(delays, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5], rtol=1e-5)
        self.assertEqual(transport.retry_delay(code, None, 1, 3, 0.0), 0.05)
        self.assertEqual(transport.retry_delay(code, "1000", 1, 3, 0.5), 1.05)
        self.assertEqual(transport.retry_delay(code, str(10 ** 30), 1, 3, 0.0), 86400)
        self.assertIsNone(transport.retry_delay(code, None, 4, 3, 0.0))
        self.assertEqual(transport.retry_delay(code, None, 10 ** 6, 10 ** 6, 0.0), 2.5)

    def test_the_contract_is_the_one_in_the_tree(self):
        for name, message in (("BackwardRequestHeader", pb.BackwardRequestHeader),
                              ("ExecutionReport", pb.ExecutionReport)):
            self.assertEqual([f.name for f in getattr(schema, name).DESCRIPTOR.fields],
                             [f.name for f in message.DESCRIPTOR.fields])
        self.assertEqual(schema.Reason.items(), pb.Reason.items())


if __name__ == "__main__":
    unittest.main()
