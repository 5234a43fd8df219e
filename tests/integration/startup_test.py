"""Starting: addresses, refusals, settings and their precedence, modes, logs."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import unittest
import urllib.error
import urllib.request

import numpy as np

from harness import contract
from harness.cases import simple_case
from harness.contract import pb
from harness.server import ATTND, Attnd, absent_cuda_paths, has_gpu, run_refused

T = contract.TIMEOUT_S


def attnd(*arguments, env=None):
    done = subprocess.run([ATTND, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=120, text=True,
                          env={**os.environ, **(env or {})})
    return done.returncode, done.stdout, done.stderr


class StartupTest(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="attnd_startup_"))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        self.request = simple_case(np.random.default_rng(2)).forward_request()

    # --------------------------------------------------------------------------------- addresses

    def test_unix_socket(self):
        path = self.directory / "attnd.sock"
        with Attnd(listen=f"unix:{path}") as server:
            stub = server.stub(target=f"unix:{path}")
            self.assertEqual(stub.Forward(self.request, timeout=T).report.path, "flash_cpu")

    def test_several_addresses(self):
        path = self.directory / "attnd.sock"
        with Attnd(f"--listen=unix:{path}") as server:
            for target in (server.target, f"unix:{path}"):
                stub = server.stub(target=target)
                self.assertEqual(stub.Forward(self.request, timeout=T).report.path, "flash_cpu")

    def test_busy_port_is_refused_loudly(self):
        with Attnd() as server:
            status, text = run_refused(listen=server.target)
            self.assertGreater(status, 0)
            self.assertIn(str(server.port), text)
            server.info()

    def test_port_of_another_program(self):
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            status, text = run_refused(listen=f"127.0.0.1:{port}")
            self.assertGreater(status, 0)
            self.assertIn(str(port), text)

    def test_busy_metrics_port(self):
        with Attnd() as server:
            status, text = run_refused(metrics=f"127.0.0.1:{server.metrics_port}")
            self.assertGreater(status, 0)
            self.assertIn(str(server.metrics_port), text)

    def test_public_address_needs_a_flag_or_tls(self):
        for address in ("0.0.0.0:0", "[::]:0", "192.0.2.1:0"):
            with self.subTest(address):
                status, text = run_refused(listen=address)
                self.assertGreater(status, 0)
                self.assertIn(address, text)
                self.assertIn("--allow-insecure-public", text)
        with Attnd("--allow-insecure-public", listen="0.0.0.0:0") as server:
            self.assertEqual(server.stub().Forward(self.request, timeout=T).report.path,
                             "flash_cpu")

    # ---------------------------------------------------------------------------------- settings

    def effective(self, *arguments, env=None):
        status, out, err = attnd("--check-config", *arguments, env=env)
        self.assertEqual(status, 0, err)
        settings = {}
        for line in out.splitlines():
            name, equals, value = line.partition(" = ")
            if equals:
                settings[name] = value
        return settings

    def test_precedence_flag_environment_file_default(self):
        file = self.directory / "attnd.toml"
        file.write_text('max-inflight-requests = 11\nexecutor-workers = 3\nlog-level = "warn"\n')
        env = {"ATTND_EXECUTOR_WORKERS": "4", "ATTND_LOG_LEVEL": "error"}
        settings = self.effective(f"--config={file}", "--log-level=debug", env=env)
        self.assertEqual(settings["log-level"], '"debug"')           # flag
        self.assertEqual(settings["executor-workers"], "4")          # environment
        self.assertEqual(settings["max-inflight-requests"], "11")    # file
        self.assertEqual(settings["max-concurrent-streams"], "256")  # default
        with Attnd(f"--config={file}", env=env) as server:
            self.assertEqual(server.info().limits.max_inflight_requests, 11)

    def test_check_config_prints_what_it_reads(self):
        first = attnd("--check-config", "--max-unary-bytes=2MiB", "--executor-workers=7")[1]
        file = self.directory / "attnd.toml"
        file.write_text(first)
        self.assertEqual(attnd("--check-config", f"--config={file}")[1], first)

    @unittest.skipIf(has_gpu(), "this host has a GPU")
    def test_cuda_paths_say_why_they_are_off(self):
        def reasons(*flags):
            with Attnd(*flags) as server:
                info = server.stub().GetServerInfo(pb.GetServerInfoRequest(), timeout=T)
                self.assertTrue(all(d.kind == pb.DEVICE_KIND_CPU for d in info.devices))
                return {p.path: [(pb.Reason.Name(r.reason), r.detail) for r in p.rejections]
                        for p in info.paths if not p.available}

        off = reasons()
        for path, reason in absent_cuda_paths().items():
            ((name, detail),) = off[path]
            self.assertEqual(name, "REASON_" + reason)
            if reason == "NO_CUDA_DEVICE":
                self.assertRegex(detail, "cudaError|no device")  # in the driver's words
        switched_off = reasons("--cuda-devices=none")
        for path, reason in absent_cuda_paths().items():
            want = "REASON_NOT_BUILT" if reason == "NOT_BUILT" else "REASON_DISABLED_BY_CONFIG"
            self.assertEqual([name for name, _ in switched_off[path]], [want])
        # A device that is asked for by its number must be there.
        status, text = run_refused("--cuda-devices=0")
        self.assertEqual(status, 2)
        self.assertIn("--cuda-devices 0", text)

    def test_bad_settings_are_refused_by_name(self):
        file = self.directory / "bad.toml"
        file.write_text("no-such-setting = 1\n")
        cases = [(["--max-unary-bytes=3GiB"], "max-unary-bytes"),
                 (["--max-unary-bytes=many"], "many"),
                 (["--executor-workers=257"], "executor-workers"),
                 (["--cuda-devices=first"], "cuda-devices"),
                 (["--drain-timeout=soon"], "soon"),
                 (["--log-level=loud"], "loud"),
                 (["--no-such-flag"], "no-such-flag"),
                 (["--disable-path=flash_tpu"], "flash_tpu"),
                 (["--listen=nonsense"], "nonsense"),
                 (["--listen=127.0.0.1:70000"], "70000"),
                 ([f"--config={self.directory / 'missing.toml'}"], "missing.toml"),
                 ([f"--config={file}"], "no-such-setting"),
                 (["left-over"], "left-over")]
        for flags, word in cases:
            with self.subTest(flags[0]):
                status, text = run_refused(*flags)
                self.assertGreater(status, 0, text)
                self.assertIn(word, text)

    def test_bad_environment_is_refused_by_name(self):
        status, text = run_refused(env={"ATTND_EXECUTOR_WORKERS": "several"})
        self.assertGreater(status, 0)
        self.assertIn("several", text)

    def test_help_and_version(self):
        status, out, _ = attnd("--help")
        self.assertEqual(status, 0)
        for word in ("--listen", "--tls-cert", "--max-inflight-bytes", "Precedence"):
            self.assertIn(word, out)
        for line in out.splitlines():
            self.assertLessEqual(len(line), 120)
        status, out, _ = attnd("--version")
        self.assertEqual(status, 0)
        with Attnd() as server:
            self.assertIn(server.info().version, out)

    # ------------------------------------------------------------------------------------- paths

    def test_disabled_path(self):
        with Attnd("--disable-path=flash_cpu") as server:
            stub = server.stub()
            report = stub.Forward(self.request, timeout=T).report
            self.assertEqual(report.path, "standard_cpu")
            self.assertIn(("flash_cpu", pb.REASON_DISABLED_BY_CONFIG),
                          [(r.path, r.reason) for r in report.rejections])
            plan = stub.Plan(simple_case(np.random.default_rng(2)).plan_request(), timeout=T)
            self.assertEqual(plan.path, "standard_cpu")
            self.assertIn(("flash_cpu", pb.REASON_DISABLED_BY_CONFIG),
                          [(r.path, r.reason) for r in plan.rejections])
            info = {p.path: p for p in server.info().paths}
            self.assertFalse(info["flash_cpu"].available)
            metrics = server.metrics()
            self.assertEqual(metrics.total("attn_path_available", path="flash_cpu"), 0)
            self.assertEqual(metrics.total("attn_path_available", path="standard_cpu"), 1)
            self.assertGreaterEqual(metrics.total("attn_rejections_total", path="flash_cpu",
                                                  reason="DISABLED_BY_CONFIG"), 1)

    def test_all_paths_disabled(self):
        with Attnd("--disable-path=flash_cpu", "--disable-path=standard_cpu") as server:
            import grpc
            with self.assertRaises(grpc.RpcError) as caught:
                server.stub().Forward(self.request, timeout=T)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)
            self.assertIn("DISABLED_BY_CONFIG", caught.exception.details())

    def test_self_test_only(self):
        status, out, err = attnd("--self-test-only")
        self.assertEqual(status, 0, err)
        for path in ("flash_cpu", "standard_cpu"):
            self.assertIn(path, out)

    # -------------------------------------------------------------------------------------- logs

    def test_json_logs_are_objects_and_calls_write_none(self):
        with Attnd("--log-format=json") as server:
            stub = server.stub()
            before = len(server.log().splitlines())
            self.assertGreater(before, 0)
            for _ in range(50):
                stub.Forward(self.request, timeout=T)
            self.assertLess(len(server.log().splitlines()), before + 5)
            for line in server.log().splitlines():
                self.assertIsInstance(json.loads(line), dict)

    def test_debug_logs_name_the_request(self):
        with Attnd("--log-level=debug") as server:
            report = server.stub().Forward(self.request, timeout=T).report
            self.assertIn(report.request_id, server.log())

    # -------------------------------------------------------------------------------------- HTTP

    def test_health_pages(self):
        with Attnd() as server:
            for page in ("healthz", "readyz"):
                url = f"http://127.0.0.1:{server.metrics_port}/{page}"
                with urllib.request.urlopen(url, timeout=T) as reply:
                    self.assertEqual(reply.status, 200)
            with self.assertRaises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/../etc/passwd",
                                       timeout=T)
            self.assertEqual(caught.exception.code, 404)
            caught.exception.close()


if __name__ == "__main__":
    unittest.main(verbosity=2)
