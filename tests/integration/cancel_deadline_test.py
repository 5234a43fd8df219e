"""Cancellation and deadlines, of calls that wait and of calls that run."""

import time
import unittest

import grpc
from harness import contract
from harness.contract import pb
from harness.long_calls import long_backward, long_forward, long_header, wait_running
from harness.server import SLOWNESS, Attnd, wait_idle, wait_until

T = contract.TIMEOUT_S * SLOWNESS
CANCELLED = grpc.StatusCode.CANCELLED
DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED
# A stopped call must leave within this; run to its end it would take far longer.
STOPS_WITHIN_S = 3.0 * SLOWNESS


class CancelDeadlineTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # One at a time, on one thread: the second call waits.
        cls.server = cls.enterClassContext(Attnd("--executor-workers=1", "--threads=1"))
        cls.channel = cls.server.channel()
        cls.stub = contract.pb_grpc.AttentionStub(cls.channel)
        cls.executions_before = None

    def tearDown(self):
        wait_idle(self.server)

    def executions(self):
        return self.server.metrics().total("attn_executions_total")

    def answered(self, code, method="Forward"):
        return self.server.metrics().total("attn_requests_total", method=method, code=code)

    def stops_soon(self, method, codes, answered_before):
        start = time.monotonic()
        wait_idle(self.server)
        self.assertLess(time.monotonic() - start, STOPS_WITHIN_S)
        wait_until(
            lambda: sum(self.answered(code, method) for code in codes) == answered_before + 1,
            f"{method} counted as {' or '.join(codes)}", 10, self.server.process)

    def check_cancel_running(self, method, request):
        before, executions = self.answered("CANCELLED", method), self.executions()
        call = getattr(self.stub, method).future(request, timeout=T)
        wait_running(self.server, 1)
        call.cancel()
        self.stops_soon(method, ["CANCELLED"], before)
        self.assertEqual(call.code(), CANCELLED)
        self.assertEqual(self.executions(), executions)  # it did not run to its end

    def test_cancel_running_forward(self):
        self.check_cancel_running("Forward", long_forward())

    def test_cancel_running_backward(self):
        self.check_cancel_running("Backward", long_backward())

    def test_cancel_running_standard_path(self):
        request = long_forward(seqlen=8192, num_heads=64)
        request.header.path_policy.mode = pb.PATH_POLICY_FORCE_STANDARD
        self.check_cancel_running("Forward", request)

    def test_cancel_running_stream(self):
        before = self.answered("CANCELLED", "ForwardStream")
        call = self.stub.ForwardStream(contract.stream_requests(*long_header()), timeout=T)
        wait_running(self.server, 1)
        call.cancel()
        self.stops_soon("ForwardStream", ["CANCELLED"], before)

    def test_cancel_queued(self):
        first = self.stub.Forward.future(long_forward(), timeout=T)
        wait_running(self.server, 1)
        second = self.stub.Forward.future(long_forward(), timeout=T)
        wait_running(self.server, 1, queued=1)
        second.cancel()
        wait_running(self.server, 1)  # the first still runs
        self.assertFalse(first.done())
        first.cancel()

    def test_deadline_running(self):
        # A client whose deadline passes cancels. A server that learned of the call late, on a busy
        # host, counts from then, and may see that first: once of three it must not.
        codes = ("DEADLINE_EXCEEDED", "CANCELLED")
        for _ in range(3):
            before = [self.answered(code) for code in codes]
            with self.assertRaises(grpc.RpcError) as caught:
                self.stub.Forward(long_forward(), timeout=0.5 * SLOWNESS)
            self.assertEqual(caught.exception.code(), DEADLINE)
            self.stops_soon("Forward", codes, sum(before))
            if self.answered("DEADLINE_EXCEEDED") == before[0] + 1:
                return
        self.fail("three calls whose deadline passed count as cancelled")

    def test_deadline_queued(self):
        first = self.stub.Forward.future(long_forward(), timeout=T)
        wait_running(self.server, 1)
        with self.assertRaises(grpc.RpcError) as caught:
            self.stub.Forward(long_forward(), timeout=0.3)
        self.assertEqual(caught.exception.code(), DEADLINE)
        wait_running(self.server, 1)
        self.assertFalse(first.done())
        first.cancel()

    def test_queued_call_follows_a_cancelled_one(self):
        first = self.stub.Forward.future(long_forward(), timeout=T)
        wait_running(self.server, 1)
        second = self.stub.Forward.future(long_forward(seqlen=4096), timeout=T)
        wait_running(self.server, 1, queued=1)
        first.cancel()
        self.assertEqual(second.result().report.path, "flash_cpu")

    def test_deadline_already_past(self):
        with self.assertRaises(grpc.RpcError) as caught:
            self.stub.Forward(long_forward(), timeout=0)
        self.assertEqual(caught.exception.code(), DEADLINE)

    def test_cancel_while_uploading(self):
        header, payloads = long_header()
        import threading
        stop = threading.Event()
        self.addCleanup(stop.set)

        def requests():
            for index, message in enumerate(contract.stream_requests(header, payloads)):
                if index == 3:
                    stop.wait(T)
                yield message

        call = self.stub.ForwardStream(requests(), timeout=T)
        wait_until(lambda: self.server.metrics().total("attn_inflight_requests") == 1,
                   "the stream is admitted", 20, self.server.process)
        call.cancel()
        wait_idle(self.server)

    def test_deadline_while_uploading(self):
        header, payloads = long_header()
        import threading
        stop = threading.Event()
        self.addCleanup(stop.set)

        def requests():
            yield pb.ForwardStreamRequest(header=header)
            stop.wait(T)

        with self.assertRaises(grpc.RpcError) as caught:
            for _ in self.stub.ForwardStream(requests(), timeout=0.5):
                pass
        self.assertEqual(caught.exception.code(), DEADLINE)
        wait_idle(self.server)


if __name__ == "__main__":
    unittest.main(verbosity=2)
