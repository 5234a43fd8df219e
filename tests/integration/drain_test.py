"""SIGTERM: health flips first, new calls are refused, calls in flight finish, exit status 0."""

import signal
import threading
import time
import unittest

import grpc
import numpy as np

from harness import contract, reference
from harness.cases import simple_case
from harness.contract import health_grpc, health_pb, pb, read_tensor
from harness.long_calls import long_forward, long_header, wait_running
from harness.server import SLOWNESS, Attnd, wait_until

T = contract.TIMEOUT_S * SLOWNESS
NOT_SERVING = health_pb.HealthCheckResponse.NOT_SERVING
SERVING = health_pb.HealthCheckResponse.SERVING


class DrainTest(unittest.TestCase):
    def watch(self, server, service=""):
        watch = health_grpc.HealthStub(server.channel()).Watch(
            health_pb.HealthCheckRequest(service=service), timeout=T)
        self.assertEqual(next(watch).status, SERVING)
        return watch

    def test_calls_in_flight_finish(self):
        with Attnd("--drain-timeout=60s") as server:
            watches = [self.watch(server), self.watch(server, contract.SERVICE)]
            stub = server.stub()
            rng = np.random.default_rng(3)
            case = simple_case(rng, seqlen_q=50, seqlen_k=60, num_heads=4)
            header, payloads = case.forward()
            resume = threading.Event()
            self.addCleanup(resume.set)

            def slow_upload():
                yield pb.ForwardStreamRequest(header=header)
                resume.wait(T)
                yield from contract.chunks_of(payloads)

            stream = stub.ForwardStream(slow_upload(), timeout=T)
            # Some seconds of work.
            unary = stub.Forward.future(long_forward(seqlen=8192, num_heads=16), timeout=T)
            wait_until(lambda: server.metrics().total("attn_inflight_requests") == 2,
                       "two calls in flight", 20, server.process)
            server.terminate()
            for watch in watches:
                self.assertEqual(next(watch).status, NOT_SERVING)
            with self.assertRaises(grpc.RpcError) as caught:
                stub.Forward(case.forward_request(), timeout=T)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)
            self.assertTrue(server.alive())
            resume.set()
            got_header, got_payloads, _ = contract.collect_stream(stream)
            expected = reference.forward(case)
            self.assertLessEqual(reference.worst_ratio(
                read_tensor(got_header.out, got_payloads), expected["out"]), 1.0)
            self.assertEqual(unary.result().report.path, "flash_cpu")
            self.assertEqual(server.wait(), 0)

    def test_idle_server_leaves_at_once(self):
        with Attnd() as server:
            server.info()
            start = time.monotonic()
            server.terminate()
            self.assertEqual(server.wait(), 0)
            self.assertLess(time.monotonic() - start, 5 * SLOWNESS)

    def test_sigint_drains_too(self):
        with Attnd() as server:
            server.process.send_signal(signal.SIGINT)
            self.assertEqual(server.wait(), 0)

    def test_open_watches_do_not_delay_the_exit(self):
        with Attnd("--drain-timeout=60s") as server:
            self.watch(server)
            start = time.monotonic()
            server.terminate()
            self.assertEqual(server.wait(), 0)
            self.assertLess(time.monotonic() - start, 10 * SLOWNESS)

    def test_drain_timeout_ends_what_is_left(self):
        with Attnd("--drain-timeout=500ms", "--threads=1", expect_clean=False) as server:
            call = server.stub().Forward.future(long_forward(), timeout=T)
            wait_running(server, 1)
            start = time.monotonic()
            server.terminate()
            status = server.wait()
            self.assertLess(time.monotonic() - start, 8 * SLOWNESS)
            self.assertGreaterEqual(status, 0, "killed by a signal")
            self.assertIn(call.code(), (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED))

    def test_half_open_stream_ends_at_the_drain_timeout(self):
        with Attnd("--drain-timeout=500ms", expect_clean=False) as server:
            release = threading.Event()
            self.addCleanup(release.set)
            header, _ = long_header(seqlen=64)

            def parked():
                yield pb.ForwardStreamRequest(header=header)
                release.wait(T)

            call = server.stub().ForwardStream(parked(), timeout=T)
            wait_until(lambda: server.metrics().total("attn_inflight_requests") == 1,
                       "a parked stream", 20, server.process)
            server.terminate()
            self.assertGreaterEqual(server.wait(), 0)
            self.assertIn(call.code(), (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED))

    def test_second_signal_does_not_wait(self):
        with Attnd("--drain-timeout=600s", "--threads=1", expect_clean=False) as server:
            call = server.stub().Forward.future(long_forward(), timeout=T)
            wait_running(server, 1)
            watch = self.watch(server)
            server.terminate()
            self.assertEqual(next(watch).status, NOT_SERVING)
            start = time.monotonic()
            server.terminate()
            server.wait()
            self.assertLess(time.monotonic() - start, 8 * SLOWNESS)
            self.assertIn(call.code(), (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED))


if __name__ == "__main__":
    unittest.main(verbosity=2)
