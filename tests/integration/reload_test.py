"""SIGHUP: paths are switched off and on in a live server, and everything that tells of it follows."""

import signal
import unittest

import grpc
import numpy as np

from harness import contract
from harness.cases import simple_case
from harness.contract import health_pb, pb
from harness.server import Attnd, wait_until

T = contract.TIMEOUT_S


class ReloadTest(unittest.TestCase):
    def setUp(self):
        self.server = Attnd("--canary-interval=100ms")
        self.config = self.server.directory / "attnd.toml"
        self.write("")
        self.server.command.append(f"--config={self.config}")
        self.enterContext(self.server)
        self.stub = self.server.stub()
        self.request = simple_case(np.random.default_rng(1)).forward_request()

    def write(self, text):
        self.config.write_text(text)

    def reload(self, word="settings read again"):
        """Reads the settings again and waits until the log says that it is done."""
        times = self.server.log().count(word)
        self.server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: self.server.log().count(word) > times, word, 10, self.server.process)

    def path(self):
        return self.stub.Forward(self.request, timeout=T).report

    def test_disable_and_enable(self):
        self.assertEqual(self.path().path, "flash_cpu")
        self.write('disable-path = ["flash_cpu"]\n')
        self.reload()
        report = self.path()  # the same header: no plan of before may be used
        self.assertEqual(report.path, "standard_cpu")
        self.assertIn(("flash_cpu", pb.REASON_DISABLED_BY_CONFIG),
                      [(r.path, r.reason) for r in report.rejections])
        m = self.server.metrics()
        self.assertEqual(m.total("attn_path_available", path="flash_cpu"), 0)
        self.assertEqual(m.total("attn_fallbacks_total", reason="DISABLED_BY_CONFIG"), 1)
        self.assertEqual(m.total("attn_executions_total", flash="false"), 1)
        self.assertEqual(m.total("attn_executions_total", flash="true"), 1)
        wait_until(lambda: self.server.metrics().total("attn_canary_runs_total", result="ok",
                                                       path="standard_cpu") > 0,
                   "the canary runs where calls run", 10, self.server.process)
        self.write("")
        self.reload()
        self.assertEqual(self.path().path, "flash_cpu")
        self.assertEqual(self.server.metrics().total("attn_path_available", path="flash_cpu"), 1)
        self.assertEqual(self.server.metrics().total("attn_canary_runs_total", result="failed"), 0)

    def test_a_path_that_was_off_from_the_start_is_tested_first(self):
        self.server.stop()
        self.write('disable-path = ["flash_cpu"]\n')
        self.server.ports_file.unlink()
        self.server.start()
        self.stub = self.server.stub()
        self.assertFalse(self.server.metrics().select("attn_self_test_passed", path="flash_cpu"))
        self.write("")
        self.reload()
        self.assertEqual(self.server.metrics().total("attn_self_test_passed", path="flash_cpu"), 1)
        self.assertEqual(self.path().path, "flash_cpu")

    def test_health_follows(self):
        self.write('disable-path = ["flash_cpu", "standard_cpu"]\n')
        self.reload()
        self.assertEqual(self.server.health(), health_pb.HealthCheckResponse.NOT_SERVING)
        with self.assertRaises(grpc.RpcError) as refused:
            self.path()
        self.assertEqual(refused.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)
        wait_until(lambda: self.server.metrics().total("attn_canary_ok", device="cpu") == 0,
                   "the canary fails without a path", 10, self.server.process)
        self.write("")
        self.reload()
        self.assertEqual(self.server.health(), health_pb.HealthCheckResponse.SERVING)
        self.assertEqual(self.path().path, "flash_cpu")

    def test_a_bad_file_changes_nothing(self):
        for text in ('disable-path = ["flash_gpu"]\n', "no such setting = 1\n", "threads = x\n"):
            self.write(text)
            self.reload("settings stay as they were")
            self.assertEqual(self.path().path, "flash_cpu", text)

    def test_what_needs_a_restart_is_named(self):
        self.write('max-inflight-requests = 7\nlog-level = "debug"\n')
        self.reload()
        wait_until(lambda: "needs a restart name=max-inflight-requests" in self.server.log(),
                   "the setting is named", 10, self.server.process)
        self.assertNotIn("restart name=log-level", self.server.log())
        self.path()
        wait_until(lambda: "debug call" in self.server.log(), "log-level applies", 10,
                   self.server.process)


if __name__ == "__main__":
    unittest.main(verbosity=2)
