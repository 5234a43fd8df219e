"""Admission: by count and by bytes, refused with RESOURCE_EXHAUSTED and a hint when to retry."""

import threading
import unittest

import grpc
import numpy as np

from harness import contract
from harness.cases import simple_case
from harness.contract import pb
from harness.long_calls import long_forward, long_header, wait_running
from harness.server import SLOWNESS, Attnd, wait_idle, wait_until

T = contract.TIMEOUT_S * SLOWNESS


class AdmissionTest(unittest.TestCase):
    def refused(self, call, *words):
        with self.assertRaises(grpc.RpcError) as caught:
            result = call()
            if hasattr(result, "__next__"):
                list(result)
        error = caught.exception
        self.assertEqual(error.code(), grpc.StatusCode.RESOURCE_EXHAUSTED, error.details())
        for word in words:
            self.assertIn(word, error.details())
        pushback = dict(error.trailing_metadata())["grpc-retry-pushback-ms"]
        self.assertGreater(int(pushback), 0)
        self.assertLess(int(pushback), 60_000)

    def small(self):
        return simple_case(np.random.default_rng(1)).forward_request()

    def test_by_count(self):
        with Attnd("--executor-workers=1", "--threads=1", "--max-inflight-requests=2") as server:
            stub = server.stub()
            first = stub.Forward.future(long_forward(), timeout=T)
            wait_running(server, 1)
            second = stub.Forward.future(long_forward(), timeout=T)
            wait_running(server, 1, queued=1)
            self.refused(lambda: stub.Forward(self.small(), timeout=T), "2")
            self.refused(lambda: stub.ForwardStream(
                contract.stream_requests(*simple_case(np.random.default_rng(1)).forward()),
                timeout=T), "2")
            # What costs nothing is still answered.
            stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=T)
            stub.Plan(simple_case(np.random.default_rng(1)).plan_request(), timeout=T)
            errors = server.metrics().total("attn_errors_total", code="RESOURCE_EXHAUSTED")
            self.assertEqual(errors, 2)
            first.cancel()
            second.cancel()
            wait_idle(server)
            stub.Forward(self.small(), timeout=T)

    def test_by_bytes(self):
        # One long call of about 8 MiB of tensors fits, two do not.
        with Attnd("--executor-workers=1", "--threads=1", "--max-inflight-bytes=32MiB",
                   "--max-unary-bytes=16MiB") as server:
            stub = server.stub()
            sizes = dict(seqlen=32768, num_heads=16, head_dim=8)  # 8 MiB in, 10 MiB out
            first = stub.Forward.future(long_forward(**sizes), timeout=T)
            wait_running(server, 1)
            held = server.metrics().total("attn_inflight_bytes")
            self.assertGreaterEqual(held, 18 << 20)
            self.assertLessEqual(held, 32 << 20)
            self.refused(lambda: stub.Forward(long_forward(**sizes), timeout=T), str(32 << 20))
            smaller = stub.Forward.future(long_forward(seqlen=8192), timeout=T)  # still fits
            wait_running(server, 1, queued=1)
            first.cancel()
            smaller.result()
            wait_idle(server)

    def test_streams_that_upload_nothing_do_not_keep_others_out_for_ever(self):
        """Half-open streams hold admission; when they go, it is given back."""
        with Attnd("--max-inflight-requests=4") as server:
            release = threading.Event()
            self.addCleanup(release.set)
            header, _ = long_header(seqlen=64)
            stub = server.stub()

            def parked():
                yield pb.ForwardStreamRequest(header=header)
                release.wait(T)

            calls = [stub.ForwardStream(parked(), timeout=T) for _ in range(4)]
            wait_until(lambda: server.metrics().total("attn_inflight_requests") == 4,
                       "four parked streams", 20, server.process)
            self.refused(lambda: stub.Forward(self.small(), timeout=T), "4")
            for call in calls:
                call.cancel()
            wait_idle(server)
            stub.Forward(self.small(), timeout=T)


if __name__ == "__main__":
    unittest.main(verbosity=2)
