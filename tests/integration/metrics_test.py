"""/metrics: every series from the start, and counters that say exactly what happened."""

import collections
import unittest

import grpc
import numpy as np

from harness import contract
from harness.cases import simple_case
from harness.contract import pb
from harness.server import INFLIGHT_GAUGES, SLOWNESS, Attnd, has_gpu, wait_idle, wait_until

T = contract.TIMEOUT_S
PATHS = ("flash_sm90", "flash_sm80", "standard_cuda", "flash_cpu", "standard_cpu")
HEAD_DIMS = ("1-32", "33-64", "65-128", "129-256", "257-512")
REASONS = [name[len("REASON_"):] for name, value in pb.Reason.items() if value]


class MetricsTest(unittest.TestCase):
    def setUp(self):
        self.server = self.enterContext(Attnd())
        self.stub = self.server.stub()
        self.rng = np.random.default_rng(5)

    def test_everything_is_registered_at_zero(self):
        m = self.server.metrics()
        for path in PATHS:
            for reason in REASONS:
                self.assertEqual(
                    len(m.select("attn_rejections_total", path=path, reason=reason)),
                    1, (path, reason))
            for which in ("forward", "backward"):
                for dtype in ("fp32", "fp16", "bf16"):
                    flash = "true" if path.startswith("flash") else "false"
                    for head_dim in HEAD_DIMS:
                        self.assertEqual(
                            len(m.select("attn_executions_total", path=path, dtype=dtype,
                                         head_dim=head_dim, flash=flash, **{"pass": which})), 1)
        for name in ("attn_rejections_total", "attn_executions_total", "attn_requests_total",
                     "attn_errors_total", "attn_bytes_total", "attn_flops_total"):
            self.assertIn(name, m.names())
            self.assertEqual(m.total(name), 0, name)
        for gauge in INFLIGHT_GAUGES:
            self.assertIn(gauge, m.names())
            self.assertEqual(m.total(gauge), 0, gauge)
        for code in grpc.StatusCode:
            self.assertTrue(m.select("attn_requests_total", code=code.name), code)
        self.assertEqual(m.total("attn_build_info"), 1)
        self.assertEqual(m.total("attn_device_info", kind="cpu"), 1)
        for path in ("flash_cpu", "standard_cpu"):
            self.assertEqual(m.total("attn_self_test_passed", path=path), 1)
            self.assertEqual(m.total("attn_path_available", path=path), 1)
        for path in PATHS[:3]:
            self.assertEqual(m.total("attn_path_available", path=path), 0)

    def test_names_units_and_help(self):
        m = self.server.metrics()
        for name, kind in m.types.items():
            self.assertTrue(name.startswith("attn_"), name)
            self.assertTrue(m.helps.get(name), name)
            if kind == "counter":
                self.assertTrue(name.endswith("_total"), name)
            else:
                self.assertFalse(name.endswith("_total"), name)
            self.assertNotRegex(name, "_(ms|us|ns|ki?b|mi?b|gi?b|percent|milliseconds)(_|$)")
        self.assertLess(len(m.samples), 5000)  # labels are bounded

    def test_allocator_gauges(self):
        """What a large message took is in use, then retained, and given back at rest."""
        in_use = "attn_process_allocator_in_use_bytes"
        retained = "attn_process_allocator_retained_bytes"
        before = self.server.metrics()
        for gauge in (in_use, retained):
            self.assertIn(gauge, before.names())
        if SLOWNESS > 1:
            self.skipTest("a sanitizer's allocator does not say")
        self.assertGreater(before.total(in_use), 100_000)
        case = simple_case(self.rng, seqlen_q=1, seqlen_k=32768, num_heads=4, num_kv_heads=4,
                           head_dim=64)
        channel = self.server.channel()
        contract.pb_grpc.AttentionStub(channel).Forward(case.forward_request(), timeout=T)  # 64 MiB
        channel.close()
        wait_until(lambda: self.server.metrics().total(retained) > 24_000_000,
                   "what was freed is retained", 4, self.server.process)

        def given_back():
            m = self.server.metrics()
            return (m.total(retained) < 16_000_000
                    and m.total(in_use) < before.total(in_use) + 8_000_000)

        wait_until(given_back, "memory is given back at rest", 20, self.server.process)

    def test_latency_buckets_start_at_ten_microseconds(self):
        m = self.server.metrics()
        bounds = {float(dict(labels)["le"])
                  for labels in m.select("attn_stage_seconds_bucket", stage="kernel")}
        self.assertEqual(min(bounds), 1e-5)
        self.assertEqual(max(bounds), float("inf"))
        for stage in ("parse", "gather", "queue", "kernel", "reply", "handler"):
            self.assertTrue(m.select("attn_stage_seconds_bucket", stage=stage), stage)

    def test_counters_say_what_happened(self):
        case = simple_case(self.rng, seqlen_q=20, seqlen_k=30, dtype=pb.DTYPE_BF16)
        reports = [self.stub.Forward(case.forward_request(), timeout=T).report for _ in range(3)]
        zeros = np.zeros(case.out_shape)
        backward = self.stub.Backward(
            case.backward_request(zeros, np.zeros(case.lse_shape), zeros), timeout=T).report
        wide = simple_case(self.rng, head_dim=264)
        reports.append(self.stub.Forward(wide.forward_request(), timeout=T).report)
        everything = reports + [backward]

        def settled():
            m = self.server.metrics()
            return m if m.total("attn_requests_total", code="OK") == 5 else None

        m = wait_until(settled, "five calls counted", 10, self.server.process)
        self.assertEqual(m.total("attn_executions_total", path="flash_cpu", dtype="bf16",
                                 **{"pass": "forward"}), 3)
        self.assertEqual(m.total("attn_executions_total", path="flash_cpu", dtype="bf16",
                                 **{"pass": "backward"}), 1)
        self.assertEqual(m.total("attn_executions_total", path="standard_cpu", dtype="fp32",
                                 **{"pass": "forward"}), 1)
        self.assertEqual(m.total("attn_executions_total"), 5)
        self.assertEqual(m.total("attn_requests_total", method="Forward", code="OK"), 4)
        self.assertEqual(m.total("attn_requests_total", method="Backward", code="OK"), 1)
        self.assertEqual(m.total("attn_flops_total"), sum(r.flops for r in everything))
        for level, field in (("wire_request", "wire_request_bytes"),
                             ("wire_response", "wire_response_bytes"),
                             ("compulsory", "compulsory_bytes"), ("tile", "tile_bytes"),
                             ("standard", "standard_bytes")):
            self.assertEqual(m.total("attn_bytes_total", level=level),
                             sum(getattr(r.traffic, field) for r in everything), level)
        rejected = collections.Counter(
            (r.path, pb.Reason.Name(r.reason)[len("REASON_"):])
            for report in everything for r in report.rejections)
        self.assertIn(("flash_cpu", "HEAD_DIM_UNSUPPORTED"), rejected)
        for path in PATHS:
            for reason in REASONS:
                self.assertEqual(m.total("attn_rejections_total", path=path, reason=reason),
                                 rejected[path, reason], (path, reason))
        for stage, field in (("kernel", "kernel_ns"), ("handler", "handler_ns")):
            seconds = sum(getattr(r.times, field) for r in everything) / 1e9
            self.assertAlmostEqual(m.total("attn_stage_seconds_sum", stage=stage), seconds,
                                   delta=0.02 * seconds + 1e-4)
            self.assertEqual(m.total("attn_stage_seconds_count", stage=stage), 5)
        wait_idle(self.server)

    def test_flash_share_is_there_by_count_and_by_flops(self):
        calls = [simple_case(self.rng, head_dim=d, policy=pb.PathPolicy(mode=mode))
                 for d, mode in ((16, pb.PATH_POLICY_AUTO), (16, pb.PATH_POLICY_FORCE_STANDARD),
                                 (264, pb.PATH_POLICY_AUTO))]
        reports = [self.stub.Forward(c.forward_request(), timeout=T).report for c in calls]
        self.assertEqual([r.path for r in reports], ["flash_cpu", "standard_cpu", "standard_cpu"])
        m = self.server.metrics()
        for labels, some in (({"flash": "true", "head_dim": "1-32"}, reports[:1]),
                             ({"flash": "false", "head_dim": "1-32"}, reports[1:2]),
                             ({"flash": "false", "head_dim": "257-512"}, reports[2:])):
            self.assertEqual(m.total("attn_executions_total", **labels), len(some), labels)
            self.assertEqual(m.total("attn_flops_total", **labels), sum(r.flops for r in some))
        self.assertEqual(m.total("attn_fallbacks_total", reason="POLICY"), 1)
        self.assertEqual(m.total("attn_fallbacks_total", reason="HEAD_DIM_UNSUPPORTED"), 1)
        self.assertEqual(m.total("attn_fallbacks_total"), 2)
        self.assertEqual(m.total("attn_device_flops_total", kind="cpu"),
                         sum(r.flops for r in reports))
        self.assertEqual(m.total("attn_batch_requests_count"), 3)
        self.assertGreater(m.total("attn_roofline_seconds_total"), 0)

    @unittest.skipIf(has_gpu(), "there is a GPU")
    def test_sensors_are_absent_without_a_gpu(self):
        names = self.server.metrics().names()
        for what in ("power_watts", "temperature_celsius", "sm_clock_hertz", "throttled"):
            self.assertNotIn(f"attn_device_{what}", names)

    def test_errors_by_code(self):
        case = simple_case(self.rng)
        header, payloads = case.forward()
        header.shape.num_heads = 0
        refused = pb.ForwardRequest(header=header, payload=payloads)
        case.policy = pb.PathPolicy(mode=pb.PATH_POLICY_NAMED, path="flash_sm90")
        for request in (refused, refused, case.forward_request()):
            with self.assertRaises(grpc.RpcError):
                self.stub.Forward(request, timeout=T)
        with self.assertRaises(grpc.RpcError):
            list(self.stub.ForwardStream(iter([]), timeout=T))

        def settled():
            m = self.server.metrics()
            return m if m.total("attn_errors_total") == 4 else None

        m = wait_until(settled, "four errors counted", 10, self.server.process)
        self.assertEqual(m.total("attn_errors_total", code="INVALID_ARGUMENT"), 3)
        self.assertEqual(m.total("attn_errors_total", code="FAILED_PRECONDITION"), 1)
        self.assertEqual(m.total("attn_requests_total", method="ForwardStream",
                                 code="INVALID_ARGUMENT"), 1)
        self.assertEqual(m.total("attn_executions_total"), 0)

    def test_plan_moves_no_execution_counter(self):
        self.stub.Plan(simple_case(self.rng).plan_request(), timeout=T)
        m = self.server.metrics()
        self.assertEqual(m.total("attn_executions_total"), 0)
        self.assertEqual(m.total("attn_bytes_total"), 0)
        self.assertEqual(m.total("attn_rejections_total"), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
