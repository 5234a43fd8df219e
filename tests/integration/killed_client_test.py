"""Clients that vanish: SIGKILL in the middle of anything leaves nothing behind."""

import subprocess
import sys
import unittest

import numpy as np

from harness import contract
from harness.cases import simple_case
from harness.contract import pb
from harness.long_calls import long_forward, long_header, wait_running
from harness.server import SLOWNESS, Attnd, process_group, wait_idle, wait_until

T = 120.0 * SLOWNESS


def client_main(mode, target):
    """Runs in a child process: says "there" once its call is where it is to be killed."""
    import threading
    stub = contract.pb_grpc.AttentionStub(contract.channel(target))

    def says_there():
        print("there", flush=True)

    if mode == "unary":  # killed while the call runs or waits
        call = stub.Forward.future(long_forward(), timeout=T)
        says_there()
        call.result()
    elif mode == "upload":  # killed in the middle of its chunks
        def requests():
            for index, message in enumerate(contract.stream_requests(*long_header())):
                if index == 4:
                    says_there()
                    threading.Event().wait(T)
                yield message
        list(stub.ForwardStream(requests(), timeout=T))
    elif mode == "download":  # killed with most of the reply unread
        header = pb.ForwardRequestHeader.FromString(simple_case(
            np.random.default_rng(1), seqlen_q=1, seqlen_k=1, head_dim=1).forward()[0]
            .SerializeToString())
        seqlen = 8192
        header.shape.num_heads, header.shape.num_kv_heads = 4, 1
        header.q.shape[:] = [1, seqlen, 4, 1]
        header.k.shape[:] = [1, 1, 1, 1]
        header.v.shape[:] = [1, 1, 1, 512]  # the reply: 64 MiB
        payloads = [bytes(4 * seqlen * 4), bytes(4), bytes(4 * 512)]
        responses = stub.ForwardStream(contract.stream_requests(header, payloads), timeout=T)
        next(responses)
        next(responses)
        says_there()
        threading.Event().wait(T)


class KilledClientTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Attnd("--executor-workers=1", "--threads=1"))

    def client(self, mode):
        return process_group([sys.executable, __file__, "--client", mode, self.server.target],
                             stdout=subprocess.PIPE)

    def kill_when_there(self, mode, ready=lambda: None):
        with self.client(mode) as child:
            self.assertEqual(child.stdout.readline().strip(), b"there")
            ready()
            child.kill()
            child.wait()
            child.stdout.close()
        wait_idle(self.server)

    def test_while_running(self):
        self.kill_when_there("unary", lambda: wait_running(self.server, 1))

    def test_while_queued(self):
        first = self.server.stub().Forward.future(long_forward(), timeout=T)
        wait_running(self.server, 1)
        with self.client("unary") as child:
            self.assertEqual(child.stdout.readline().strip(), b"there")
            wait_running(self.server, 1, queued=1)
            child.kill()
            child.wait()
            child.stdout.close()
        wait_running(self.server, 1)
        first.cancel()
        wait_idle(self.server)

    def test_while_uploading(self):
        self.kill_when_there("upload", lambda: wait_until(
            lambda: self.server.metrics().total("attn_inflight_requests") == 1,
            "the upload is admitted", 20, self.server.process))

    def test_while_downloading(self):
        self.kill_when_there("download")

    def test_many_at_once(self):
        children = [self.enterContext(self.client(mode))
                    for mode in ("unary", "upload", "download", "upload")]
        for child in children:
            self.assertEqual(child.stdout.readline().strip(), b"there")
        for child in children:
            child.kill()
        for child in children:
            child.wait()
            child.stdout.close()
        wait_idle(self.server)
        report = self.server.stub().Forward(
            simple_case(np.random.default_rng(1)).forward_request(), timeout=T).report
        self.assertEqual(report.path, "flash_cpu")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        client_main(*sys.argv[2:])
    else:
        unittest.main(verbosity=2)
