"""Tensors over 2 GiB by streaming, and unary messages of that size, which must never end the process.

With one key the softmax is 1, so out is v and lse is the one logit: exact answers of any size.
"""

import unittest

import grpc
import numpy as np

from harness import contract
from harness.contract import pb, tensor
from harness.server import SLOWNESS, Attnd, wait_idle

T = 150.0 * SLOWNESS
GIB = 1 << 30
NEEDED = {"request": 7 * GIB, "reply": 4 * GIB, "unary": 5 * GIB}


def available_bytes():
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def one_key_header(batch, seqlen_q, heads, head_dim, head_dim_v, dtype=pb.DTYPE_BF16):
    return pb.ForwardRequestHeader(
        shape=pb.AttentionShape(layout=pb.LAYOUT_BSHD, num_heads=heads, num_kv_heads=1),
        q=tensor(dtype, [batch, seqlen_q, heads, head_dim], 0),
        k=tensor(dtype, [batch, 1, 1, head_dim], 1),
        v=tensor(dtype, [batch, 1, 1, head_dim_v], 2))


class HugeTest(unittest.TestCase):
    def need(self, what):
        if available_bytes() < NEEDED[what]:
            self.skipTest(f"needs {NEEDED[what] >> 20} MiB of memory, "
                          f"{available_bytes() >> 20} MiB are available")

    def start(self, *flags):
        server = self.enterContext(Attnd("--max-request-bytes=8GiB", "--max-inflight-bytes=10GiB",
                                         *flags))
        return server, server.stub()

    def stream(self, stub, batch, seqlen_q, heads, head_dim, head_dim_v):
        """Sends q = 1 throughout, k = 1/head_dim, v = row number mod 251; checks every element."""
        header = one_key_header(batch, seqlen_q, heads, head_dim, head_dim_v)
        one = contract.to_bytes(np.ones(1), pb.DTYPE_BF16)
        q_bytes = 2 * batch * seqlen_q * heads * head_dim
        v = np.repeat(np.arange(batch) % 251, head_dim_v)
        payloads = {1: contract.to_bytes(np.full(batch * head_dim, 1.0 / head_dim), pb.DTYPE_BF16),
                    2: contract.to_bytes(v, pb.DTYPE_BF16)}
        chunk = one * (contract.MAX_CHUNK // 2)

        def requests():
            yield pb.ForwardStreamRequest(header=header)
            for index, data in payloads.items():
                for offset in range(0, len(data), len(chunk)):
                    yield pb.ForwardStreamRequest(chunk=pb.PayloadChunk(
                        payload_index=index, offset=offset, data=data[offset:offset + len(chunk)]))
            for offset in range(0, q_bytes, len(chunk)):
                yield pb.ForwardStreamRequest(chunk=pb.PayloadChunk(
                    payload_index=0, offset=offset, data=chunk[:q_bytes - offset]))

        expected = np.frombuffer(payloads[2], "<u2")[::head_dim_v]  # of each batch entry
        row = seqlen_q * heads * head_dim_v  # elements of out that hold one batch entry
        got = {}
        reply_header = report = None
        for message in stub.ForwardStream(requests(), timeout=T):
            part = message.WhichOneof("part")
            if part == "header":
                reply_header = message.header
            elif part == "report":
                report = message.report
            else:
                c = message.chunk
                self.assertEqual(c.offset, got.get(c.payload_index, 0))
                got[c.payload_index] = c.offset + len(c.data)
                if c.payload_index == reply_header.out.payload:
                    first = c.offset // 2
                    values = np.frombuffer(c.data, "<u2")
                    rows = np.arange(first, first + len(values)) // row
                    self.assertTrue((values == expected[rows]).all(), f"out at byte {c.offset}")
                else:
                    values = np.frombuffer(c.data, "<f4")
                    self.assertLessEqual(np.abs(values - head_dim ** -0.5).max(), 1e-5)
        self.assertEqual(list(reply_header.out.shape), [batch, seqlen_q, heads, head_dim_v])
        self.assertEqual(got[reply_header.out.payload], 2 * batch * seqlen_q * heads * head_dim_v)
        self.assertEqual(got[reply_header.lse.payload], 4 * batch * seqlen_q * heads)
        self.assertEqual(report.traffic.wire_request_bytes, q_bytes + sum(map(len,
                                                                              payloads.values())))
        return q_bytes, got[reply_header.out.payload]

    def test_request_over_2_gib_and_over_2_to_the_31_elements(self):
        self.need("request")
        server, stub = self.start()
        sent, _ = self.stream(stub, batch=66000, seqlen_q=1, heads=64, head_dim=512, head_dim_v=8)
        self.assertGreater(sent // 2, 1 << 31)  # elements, and more than 65,535 sequences
        wait_idle(server)

    def test_reply_over_2_gib(self):
        self.need("reply")
        server, stub = self.start()
        _, received = self.stream(stub, batch=36000, seqlen_q=1, heads=64, head_dim=8,
                                  head_dim_v=512)
        self.assertGreater(received, 2 * GIB)
        wait_idle(server)

    def test_unary_reply_over_2_gib_is_refused(self):
        """gRPC would abort the process that serializes such a message."""
        self.need("unary")
        server, stub = self.start("--max-unary-bytes=2047MiB")
        header = one_key_header(1, 8500, 64, 1, 512, pb.DTYPE_FP32)
        header.options.out_dtype = pb.DTYPE_FP32
        self.assertGreater(4 * 8500 * 64 * 512 + 4 * 8500 * 64, 1 << 30)
        header.q.shape[1] = 17000
        request = pb.ForwardRequest(header=header, payload=[
            bytes(4 * 17000 * 64), bytes(4), bytes(4 * 512)])
        with self.assertRaises(grpc.RpcError) as caught:
            stub.Forward(request, timeout=T)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
        self.assertIn("ForwardStream", caught.exception.details())
        self.assertTrue(server.alive())
        wait_idle(server)

    def check_unary_request(self, limit):
        self.need("unary")
        server, stub = self.start(f"--max-unary-bytes={limit}")
        q_bytes = 2 * 32800 * 64 * 512  # 2.002 GiB
        self.assertGreater(q_bytes, 2 * GIB)
        head = one_key_header(32800, 1, 64, 512, 8).SerializeToString()
        # Written by hand: generated code cannot serialize it.
        message = bytearray(contract.field(1, head) + contract.varint(2 << 3 | 2)
                            + contract.varint(q_bytes))
        message.extend(bytes(q_bytes))
        call = server.channel().unary_unary(f"/{contract.SERVICE}/Forward",
                                            request_serializer=bytes)
        with self.assertRaises(grpc.RpcError) as caught:
            call(message, timeout=T)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED,
                         caught.exception.details())
        self.assertTrue(server.alive())
        wait_idle(server)
        stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=T)

    def test_unary_request_over_2_gib_against_the_largest_limit(self):
        self.check_unary_request("2047MiB")

    def test_unary_request_over_2_gib_against_the_smallest_limit(self):
        self.check_unary_request("1MiB")


if __name__ == "__main__":
    unittest.main(verbosity=2)
