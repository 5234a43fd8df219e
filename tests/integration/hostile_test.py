"""attnd under attack, on loopback and within bounds: it neither ends, nor leaks, nor starves others.

Each test does its harm, checks that an honest call is still answered meanwhile, and at the end that
the gauges are back at 0.
"""

import gzip
import itertools
import os
import random
import threading
import unittest

import grpc
import numpy as np

from harness import contract, raw_http2
from harness.cases import simple_case
from harness.contract import pb, tensor
from harness.long_calls import long_header
from harness.raw_http2 import (END_STREAM, PING, RST_STREAM, SETTINGS, WINDOW_UPDATE, Connection,
                               frame, grpc_message)
from harness.server import SLOWNESS, Attnd, wait_idle, wait_until

T = contract.TIMEOUT_S * SLOWNESS
MIB = 1 << 20


class HostileTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Attnd(
            "--max-inflight-requests=64", "--max-unary-bytes=16MiB", "--max-request-bytes=1GiB",
            "--max-inflight-bytes=4GiB"))
        cls.request = simple_case(np.random.default_rng(1)).forward_request()
        cls.honest_stub = cls.server.stub()

    def honest(self):
        """An honest client on a connection of its own is served, where it tries again when asked to: streams of
        connections that are gone may still be on their way through admission."""
        replies = []

        def served():
            try:
                replies.append(self.honest_stub.Forward(self.request, timeout=T))
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
            return replies

        wait_until(served, "an honest client is served", 20, self.server.process)
        self.assertTrue(replies[0].report.path)

    def tearDown(self):
        self.assertTrue(self.server.alive())
        self.honest()
        wait_idle(self.server)

    def connect(self, **kwargs):
        return self.enterContext(Connection(self.server.port, **kwargs))

    # --------------------------------------------------------------------------- connections

    def test_idle_and_garbage_connections(self):
        silent = [self.connect(handshake=False) for _ in range(300)]
        for index, connection in enumerate(silent):
            connection.send([b"", b"GET / HTTP/1.1\r\n\r\n", raw_http2.PREFACE[:10],
                             os.urandom(200), raw_http2.PREFACE + b"\xff" * 50][index % 5])
        self.honest()

    def test_connection_storm(self):
        for _ in range(10):
            batch = [Connection(self.server.port) for _ in range(100)]
            for connection in batch:
                connection.start("Forward")
            self.honest()
            for connection in batch:
                connection.close()

    def test_settings_ping_and_window_floods(self):
        connection = self.connect()
        connection.send(frame(SETTINGS, 0, 0, b"\x00\x04\x7f\xff\xff\xff") * 2000)
        connection.send(frame(PING, 0, 0, b"12345678") * 2000)
        connection.send(frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff") * 10)
        self.honest()

    def test_random_frames(self):
        rng = random.Random(5)
        for _ in range(60):
            with Connection(self.server.port) as connection:
                for _ in range(20):
                    connection.send(frame(rng.randrange(12), rng.randrange(256), rng.randrange(8),
                                          rng.randbytes(rng.randrange(60))))
        self.honest()

    def test_rapid_reset(self):
        connection = self.connect()
        for _ in range(1000):
            stream = connection.start("ForwardStream")
            if not connection.send(frame(RST_STREAM, 0, stream, b"\x00\x00\x00\x08")):
                break
        self.honest()

    def test_huge_metadata(self):
        connection = self.connect()
        for size in (3000, 5000, 20000):  # the last is over HTTP/2's limit of a frame, too
            stream = connection.start("Forward", [(f"x-{i}", "v" * (size // 4)) for i in range(4)])
            connection.data(stream, grpc_message(b""), END_STREAM)
            self.assertTrue(connection.wait_end(stream), size)

    # ------------------------------------------------------------------------- half-sent calls

    def test_slow_loris(self):
        """Messages that grow by a byte at a time, and never end."""
        message = grpc_message(self.request.SerializeToString())
        connections = [self.connect() for _ in range(20)]
        streams = [(c, c.start(method)) for c in connections
                   for method in ("Forward", "ForwardStream", "Plan", "GetServerInfo")]
        for position in range(40):
            for connection, stream in streams:
                connection.data(stream, message[position:position + 1])
            if position % 10 == 0:
                self.honest()

    def test_length_that_lies(self):
        """A message announces 4 GiB and sends little: no memory is spent on the announcement."""
        before = self.server.rss_bytes()
        connections = [self.connect() for _ in range(20)]
        for connection in connections:
            for method in ("Forward", "ForwardStream"):
                stream = connection.start(method)
                connection.data(stream, grpc_message(b"abc", length=0xFFFFFFFF))
                stream = connection.start(method)
                connection.data(stream, grpc_message(b"abc", length=15 * MIB))
        self.honest()
        self.assertLess(self.server.rss_bytes() - before, 200 * MIB)

    def test_announced_tensors_take_no_memory_before_they_arrive(self):
        before = self.server.rss_bytes()
        header, _ = long_header(seqlen=1 << 20, num_heads=16, head_dim=8)  # 0.5 GiB in and out
        message = grpc_message(pb.ForwardStreamRequest(header=header).SerializeToString())
        connection = self.connect()
        for _ in range(4):
            stream = connection.start("ForwardStream")
            connection.data(stream, message)
        wait_until(lambda: self.server.metrics().total("attn_inflight_requests") >= 4,
                   "the streams are admitted", 20, self.server.process)
        self.assertLess(self.server.rss_bytes() - before, 200 * MIB)
        connection.close()

    def test_thousands_of_parked_calls(self):
        header, _ = long_header(seqlen=64)
        message = grpc_message(pb.ForwardStreamRequest(header=header).SerializeToString())
        before = self.server.rss_bytes()
        connections = [self.connect() for _ in range(16)]
        for connection in connections:
            for _ in range(250):  # 4,000 streams
                stream = connection.start("ForwardStream")
                connection.data(stream, message)
        wait_until(lambda: self.server.metrics().total("attn_inflight_requests") >= 64,
                   "admission is full", 20, self.server.process)
        with self.assertRaises(grpc.RpcError) as caught:
            self.honest_stub.Forward(self.request, timeout=T)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
        self.assertLess(self.server.rss_bytes() - before, 300 * MIB)
        for connection in connections:
            connection.close()
        wait_idle(self.server)

    def test_parked_unary_bodies(self):
        """64 calls of 15 of 16 MiB each that never end."""
        before = self.server.rss_bytes()
        body = bytes(MIB // 64)
        connection = self.connect()
        for _ in range(64):
            stream = connection.start("Forward")
            connection.data(stream, grpc_message(body, length=15 * MIB))
        self.honest()
        self.assertLess(self.server.rss_bytes() - before, 500 * MIB)

    def test_streams_without_a_single_message(self):
        connection = self.connect()
        for _ in range(200):
            connection.start("ForwardStream")
        self.honest()

    def test_reader_that_never_reads(self):
        """Replies pile up in flow control, not in memory without end."""
        header = pb.ForwardRequestHeader(
            shape=pb.AttentionShape(layout=pb.LAYOUT_BSHD, num_heads=16, num_kv_heads=1),
            q=tensor(pb.DTYPE_FP32, [1, 1024, 16, 1], 0), k=tensor(pb.DTYPE_FP32, [1, 1, 1, 1], 1),
            v=tensor(pb.DTYPE_FP32, [1, 1, 1, 512], 2))  # a reply of 32 MiB
        payloads = [bytes(4 * 1024 * 16), bytes(4), bytes(4 * 512)]
        connection = self.connect()
        body = b"".join(grpc_message(m.SerializeToString())
                        for m in contract.stream_requests(header, payloads, chunk=8192))
        streams = [connection.start("ForwardStream") for _ in range(8)]
        for stream in streams:
            for offset in range(0, len(body), 8192):
                last = offset + 8192 >= len(body)
                connection.data(stream, body[offset:offset + 8192], END_STREAM if last else 0)
        self.honest()
        connection.close()

    # -------------------------------------------------------------------------------- messages

    def call_raw(self, data, method="Forward", timeout=T, **kwargs):
        """The status code of one raw unary call."""
        try:
            contract.raw_unary(self.server.channel(), method)(data, timeout=timeout, **kwargs)
            return grpc.StatusCode.OK
        except grpc.RpcError as error:
            return error.code()

    def test_compression_bomb(self):
        """gRPC limits a message by its compressed size; 512 MiB of zeros are 0.5 MiB of gzip."""
        before = self.server.rss_bytes()
        bomb = gzip.compress(bytes(512 * MIB), 1)
        self.assertLess(len(bomb), 4 * MIB)
        connection = self.connect()
        for method in ("Forward", "ForwardStream", "Plan"):
            stream = connection.start(method, [("grpc-encoding", "gzip")])
            data = grpc_message(bomb, compressed=1)
            # The window is 64 KiB at first; read to learn of more.
            sent = threading.Thread(target=self.feed, args=(connection, stream, data))
            sent.start()
            connection.wait_end(stream)
            sent.join(T)
        self.assertLess(self.server.rss_bytes() - before, 200 * MIB)

    def feed(self, connection, stream, data):
        for offset in range(0, len(data), 16384):
            if not connection.data(stream, data[offset:offset + 16384]):
                return

    def test_compressed_flag_on_plain_bytes(self):
        connection = self.connect()
        for encoding in ("gzip", "deflate", "identity", "br", "x" * 100):
            stream = connection.start("Forward", [("grpc-encoding", encoding)])
            connection.data(stream, grpc_message(b"\x1f\x8b plain", compressed=1), END_STREAM)
            self.assertTrue(connection.wait_end(stream), encoding)

    def test_random_messages(self):
        rng = random.Random(6)
        good = self.request.SerializeToString()
        for index in range(400):
            data = bytearray(good)
            for _ in range(rng.randrange(1, 6)):
                action = rng.randrange(3)
                position = rng.randrange(len(data)) if data else 0
                if action == 0 and data:
                    data[position] = rng.randrange(256)
                elif action == 1:
                    del data[position:position + rng.randrange(1, 30)]
                else:
                    data[position:position] = rng.randbytes(rng.randrange(1, 30))
            method = ("Forward", "Backward", "Plan")[index % 3]
            code = self.call_raw(bytes(data), method)
            self.assertNotIn(code, (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN,
                                    grpc.StatusCode.UNAVAILABLE), bytes(data))

    def test_deeply_nested_groups(self):
        start = contract.varint(9 << 3 | 3)
        end = contract.varint(9 << 3 | 4)
        for depth in (1000, 100_000, 1_000_000):
            code = self.call_raw(start * depth + end * depth)
            self.assertEqual(code, grpc.StatusCode.INVALID_ARGUMENT)
            code = self.call_raw(contract.field(1, start * (depth // 40) + end * (depth // 40)))
            self.assertEqual(code, grpc.StatusCode.INVALID_ARGUMENT)

    def test_millions_of_tiny_fields(self):
        self.assertEqual(self.call_raw(contract.field(2, b"") * 1_000_000),
                         grpc.StatusCode.INVALID_ARGUMENT)
        self.assertEqual(self.call_raw(contract.field(99, b"") * 1_000_000),
                         grpc.StatusCode.INVALID_ARGUMENT)
        self.assertEqual(self.call_raw(contract.field(1, b"") * 1_000_000),
                         grpc.StatusCode.INVALID_ARGUMENT)

    # -------------------------------------------------------------------------- hostile shapes

    def every_way(self, header, payloads, allowed, timeout=T):
        """Forward, ForwardStream and Plan of a hostile header end soon, with an allowed code."""
        plan = pb.PlanRequest(payload=payloads, **{"pass": pb.PASS_FORWARD})
        plan.header.MergeFrom(pb.BackwardRequestHeader.FromString(header.SerializeToString()))
        calls = {
            "unary": lambda: self.honest_stub.Forward(
                pb.ForwardRequest(header=header, payload=payloads), timeout=timeout),
            "stream": lambda: list(self.honest_stub.ForwardStream(
                contract.stream_requests(header, payloads), timeout=timeout)),
            "plan": lambda: self.honest_stub.Plan(plan, timeout=timeout)}
        for name, call in calls.items():
            with self.subTest(name):
                try:
                    call()
                    code = grpc.StatusCode.OK
                except grpc.RpcError as error:
                    code = error.code()
                self.assertIn(code, allowed)
                self.assertTrue(self.server.alive())

    def header(self, q, k, v, num_heads, num_kv_heads, strides=None):
        dtype = pb.DTYPE_BF16
        header = pb.ForwardRequestHeader(
            shape=pb.AttentionShape(layout=pb.LAYOUT_BSHD, num_heads=num_heads,
                                    num_kv_heads=num_kv_heads),
            q=tensor(dtype, q, 0), k=tensor(dtype, k, 1), v=tensor(dtype, v, 2))
        for name, value in (strides or {}).items():
            getattr(header, name).strides[:] = value
        return header

    REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED,
               grpc.StatusCode.FAILED_PRECONDITION)

    def test_shapes_without_elements_and_without_end(self):
        """No elements, so no bytes: but a loop over the batch or the heads would never end."""
        before = self.server.rss_bytes()
        big = 1 << 40
        empty = [b"", b"", b""]
        self.every_way(self.header([big, 0, 1, 8], [big, 0, 1, 8], [big, 0, 1, 8], 1, 1), empty,
                       self.REFUSED)
        self.every_way(self.header([1 << 31, 0, 1, 8], [1 << 31, 0, 1, 8], [1 << 31, 0, 1, 8],
                                   1, 1), empty, self.REFUSED)
        self.every_way(self.header([0, 5, big, 8], [0, 5, big, 8], [0, 5, big, 8], big, big),
                       empty, self.REFUSED + (grpc.StatusCode.OK,))
        self.every_way(self.header([1, 0, big, 8], [1, 0, big, 8], [1, 0, big, 8], big, big),
                       empty, self.REFUSED + (grpc.StatusCode.OK,))
        self.every_way(self.header([0, big, 1, 8], [0, big, 1, 8], [0, big, 1, 8], 1, 1),
                       empty, self.REFUSED + (grpc.StatusCode.OK,))
        self.assertLess(self.server.rss_bytes() - before, 100 * MIB)

    def test_output_larger_than_the_input(self):
        """No keys, so q alone travels; or head_dim 1 against head_dim_v 512."""
        self.every_way(self.header([1, 1 << 40, 1, 1], [1, 1, 1, 1], [1, 1, 1, 512], 1, 1,
                                   {"q": [0, 0, 0, 1]}), [bytes(2), bytes(2), bytes(1024)],
                       self.REFUSED)

    def test_zero_strides_pretend_to_be_huge(self):
        """Two bytes of payload stand for 2^50 keys."""
        one = [0, 0, 0, 1]
        payloads = [bytes(16)] * 3
        for extent in (1 << 34, 1 << 50, 1 << 58):
            with self.subTest(extent=extent):
                # Broadcast keys are no fault by themselves: work that is begun ends at its deadline.
                self.every_way(self.header([1, 1, 1, 8], [1, extent, 1, 8], [1, extent, 1, 8],
                                           1, 1, {"k": one, "v": one}), payloads,
                               self.REFUSED + (grpc.StatusCode.DEADLINE_EXCEEDED,), 2 * SLOWNESS)
                self.every_way(self.header([1, extent, 1, 8], [1, 1, 1, 8], [1, 1, 1, 8], 1, 1,
                                           {"q": one}), payloads, self.REFUSED)
                self.every_way(self.header([extent, 1, 1, 8], [extent, 1, 1, 8],
                                           [extent, 1, 1, 8], 1, 1,
                                           {"q": one, "k": one, "v": one}), payloads,
                               self.REFUSED)

    def test_plan_of_the_unpayable(self):
        """Nothing travels with Plan, so nothing but its own checks limits it."""
        for shape in ([1 << 33, 1, 1, 1], [1, 1 << 45, 1, 1], [1, 1, 1 << 45, 1],
                      [1 << 20, 1 << 20, 1 << 10, 1 << 9]):
            with self.subTest(shape=shape):
                header = pb.BackwardRequestHeader(
                    shape=pb.AttentionShape(layout=pb.LAYOUT_BSHD, num_heads=shape[2],
                                            num_kv_heads=shape[2]))
                for name in "qkv":
                    getattr(header, name).CopyFrom(pb.Tensor(dtype=pb.DTYPE_BF16, shape=shape))
                header.options.causal = True
                for which in (pb.PASS_FORWARD, pb.PASS_BACKWARD):
                    with self.assertRaises(grpc.RpcError) as caught:
                        self.honest_stub.Plan(pb.PlanRequest(header=header, **{"pass": which}),
                                              timeout=T)
                    self.assertIn(caught.exception.code(), self.REFUSED)

    def test_packed_lengths_at_the_edge(self):
        big = (1 << 63) - 1
        for cu in ([0, big], [0, -1, 5], [-big, 5], [0, big, big, 5], [0] * 20000 + [5],
                   [big] * 100):
            header = pb.ForwardRequestHeader(
                shape=pb.AttentionShape(layout=pb.LAYOUT_THD, num_heads=1, num_kv_heads=1,
                                        cu_seqlens_q=cu, cu_seqlens_k=cu))
            for index, name in enumerate("qkv"):
                getattr(header, name).CopyFrom(tensor(pb.DTYPE_FP32, [5, 1, 4], index))
            with self.subTest(cu=cu[:4]):
                self.every_way(header, [bytes(80)] * 3,
                               self.REFUSED + ((grpc.StatusCode.OK,) if cu[-1] == 5 and cu[0] == 0
                                               and min(cu) == 0 and max(cu) == 5 else ()))

    def test_windows_and_scales_at_the_edge(self):
        top = (1 << 63) - 1
        for options in (pb.AttentionOptions(window_left=top, window_right=top),
                        pb.AttentionOptions(window_left=top, causal=True),
                        pb.AttentionOptions(window_left=0, window_right=top),
                        pb.AttentionOptions(softmax_scale=3.4e38),
                        pb.AttentionOptions(softmax_scale=-1.0),
                        pb.AttentionOptions(softmax_scale=0.0),
                        pb.AttentionOptions(softcap=1e-45),
                        pb.AttentionOptions(softcap=3.4e38)):
            header, payloads = simple_case(np.random.default_rng(1)).forward()
            header.options.CopyFrom(options)
            with self.subTest(options=str(options)):
                self.every_way(header, payloads, self.REFUSED + (grpc.StatusCode.OK,))


class SilentCallersTest(unittest.TestCase):
    """Callers that stop in the middle: --stream-idle-timeout takes back what they hold."""

    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Attnd(f"--stream-idle-timeout={int(1000 * SLOWNESS)}ms"))

    def setUp(self):
        self.release = threading.Event()
        self.addCleanup(self.release.set)

    def test_upload_that_stops(self):
        header, payloads = long_header(seqlen=64)
        for sent in (0, 1, 2):
            def requests():
                yield from itertools.islice(contract.stream_requests(header, payloads), sent)
                self.release.wait(T)

            with self.subTest(sent=sent), self.assertRaises(grpc.RpcError) as caught:
                list(self.server.stub().ForwardStream(requests(), timeout=T))
            self.assertEqual(caught.exception.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
            self.assertIn("--stream-idle-timeout", caught.exception.details())
            wait_idle(self.server)

    def test_slow_upload_that_goes_on(self):
        header, payloads = long_header(seqlen=64)
        messages = list(contract.stream_requests(header, payloads, chunk=4096))

        def requests():
            for message in messages:  # each within the time-out, all together beyond it
                yield message
                self.release.wait(2.5 * SLOWNESS / len(messages))

        contract.collect_stream(self.server.stub().ForwardStream(requests(), timeout=T))

    def test_reader_that_never_reads(self):
        header = pb.ForwardRequestHeader(
            shape=pb.AttentionShape(layout=pb.LAYOUT_BSHD, num_heads=16, num_kv_heads=1),
            q=tensor(pb.DTYPE_FP32, [1, 256, 16, 1], 0), k=tensor(pb.DTYPE_FP32, [1, 1, 1, 1], 1),
            v=tensor(pb.DTYPE_FP32, [1, 1, 1, 512], 2))  # a reply of 8 MiB
        payloads = [bytes(4 * 256 * 16), bytes(4), bytes(4 * 512)]
        body = b"".join(grpc_message(m.SerializeToString())
                        for m in contract.stream_requests(header, payloads))
        with Connection(self.server.port) as connection:
            stream = connection.start("ForwardStream")
            for offset in range(0, len(body), 8192):
                last = offset + 8192 >= len(body)
                connection.data(stream, body[offset:offset + 8192], END_STREAM if last else 0)
            wait_until(lambda: self.server.metrics().total("attn_executions_total") > 0,
                       "the call has run", 20, self.server.process)
            wait_idle(self.server)  # the connection is still open


class OversizeTest(unittest.TestCase):
    def test_messages_that_are_refused_cost_bounded_memory(self):
        """gRPC looks at a message's size when all of it has arrived: a quota bounds what arrives."""
        with Attnd("--max-unary-bytes=1MiB", "--max-inflight-bytes=64MiB") as server:
            message = contract.field(2, bytes(1 << 30))
            with self.assertRaises(grpc.RpcError) as caught:
                contract.raw_unary(server.channel(), "Forward")(message, timeout=T)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
            self.assertLess(server.peak_rss_bytes(), 500 * MIB)
            wait_idle(server)

    if SLOWNESS == 1:  # a sanitizer keeps what was freed
        def test_memory_is_given_back_when_idle(self):
            with Attnd("--max-unary-bytes=1MiB") as server:
                message = contract.field(2, bytes(512 * MIB))
                with self.assertRaises(grpc.RpcError):
                    contract.raw_unary(server.channel(), "Forward")(message, timeout=T)
                del message
                wait_until(lambda: server.rss_bytes() < 250 * MIB, "memory is given back", 30,
                           server.process)


if __name__ == "__main__":
    unittest.main(verbosity=2)
