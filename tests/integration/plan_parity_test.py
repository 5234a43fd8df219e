"""What Plan says is what Forward and Backward do: on 1,000 random requests, refusals included."""

import collections
import os
import unittest

import grpc
import numpy as np

from harness import contract
from harness.cases import random_case
from harness.contract import pb
from harness.server import Attnd

T = contract.TIMEOUT_S
REQUESTS = int(os.environ.get("ATTN_PLAN_PARITY_REQUESTS", "1000"))


def spoil(rng, header):
    """Makes the header invalid in one of many ways that Plan can see."""
    changes = [
        lambda: setattr(header.shape, "num_heads", header.shape.num_heads + 1),
        lambda: header.shape.ClearField("layout"),
        lambda: setattr(header.shape, "layout", 77),
        lambda: setattr(header.options, "window_left", -1),
        lambda: setattr(header.options, "softcap", 0.0),
        lambda: setattr(header.options, "softmax_scale", float("nan")),
        lambda: header.q.shape.__setitem__(0, -1),
        lambda: header.options.seqlens_k.append(1 << 40),
        lambda: header.v.shape.__setitem__(0, header.v.shape[0] + 1),
        lambda: setattr(header.options, "out_dtype", pb.DTYPE_UINT8),
        lambda: setattr(header.path_policy, "mode", 42),
        lambda: setattr(header, "report_level", 9),
        lambda: header.path_policy.CopyFrom(pb.PathPolicy(mode=pb.PATH_POLICY_NAMED, path="none")),
    ]
    changes[rng.integers(len(changes))]()


class PlanParityTest(unittest.TestCase):
    def setUp(self):
        self.server = self.enterContext(Attnd("--workspace-limit-bytes=2MiB"))
        self.stub = self.server.stub()
        self.outcomes = collections.Counter()

    def run_call(self, call):
        """(code, details, reply)."""
        try:
            return grpc.StatusCode.OK, "", call()
        except grpc.RpcError as error:
            return error.code(), error.details(), None

    def check(self, case, which, header, payloads):
        plan_header = pb.BackwardRequestHeader.FromString(header.SerializeToString())
        plan_request = pb.PlanRequest(header=plan_header, payload=payloads, **{"pass": which})
        code, details, plan = self.run_call(lambda: self.stub.Plan(plan_request, timeout=T))
        if which == pb.PASS_FORWARD:
            call = lambda: self.stub.Forward(
                pb.ForwardRequest(header=header, payload=payloads), timeout=T)
        else:
            call = lambda: self.stub.Backward(
                pb.BackwardRequest(header=header, payload=payloads), timeout=T)
        real_code, real_details, reply = self.run_call(call)

        if code != grpc.StatusCode.OK:  # Plan refused: so must the call, in the same words
            self.assertEqual((code, details), (real_code, real_details))
            self.outcomes[code.name] += 1
            return
        if plan.path == "":  # the policy cannot be met
            self.assertEqual(real_code, grpc.StatusCode.FAILED_PRECONDITION, real_details)
            for rejection in plan.rejections:
                self.assertIn(rejection.path, real_details)
                self.assertIn(pb.Reason.Name(rejection.reason)[len("REASON_"):], real_details)
            self.outcomes["FAILED_PRECONDITION"] += 1
            return
        self.assertEqual(real_code, grpc.StatusCode.OK, real_details)
        report = reply.report
        self.assertEqual((plan.path, plan.path_class, plan.device_kind, plan.kernel),
                         (report.path, report.path_class, report.device_kind, report.kernel))
        self.assertEqual([(r.path, r.reason, r.detail) for r in plan.rejections],
                         [(r.path, r.reason, r.detail) for r in report.rejections])
        self.assertEqual(plan.flops, report.flops)
        for level in ("compulsory_bytes", "tile_bytes", "standard_bytes"):
            self.assertEqual(getattr(plan.traffic, level), getattr(report.traffic, level), level)
        self.outcomes[report.path] += 1

    def test_plan_equals_execution(self):
        rng = np.random.default_rng(1000)
        for index in range(REQUESTS):
            case = random_case(rng, max_seqlen=300 if index % 20 == 0 else 40)
            which = pb.PASS_FORWARD if rng.random() < 0.6 else pb.PASS_BACKWARD
            if which == pb.PASS_FORWARD:
                header, payloads = case.forward()
            else:
                header, payloads = case.backward(
                    np.zeros(case.out_shape), np.zeros(case.lse_shape), np.zeros(case.out_shape))
            if rng.random() < 0.15:
                spoil(rng, header)
            with self.subTest(index=index, which=which):
                self.check(case, which, header, payloads)
        print(f"outcomes: {dict(self.outcomes)}")
        # The mixture must reach every outcome, or the test shows little.
        for outcome in ("flash_cpu", "standard_cpu", "FAILED_PRECONDITION", "INVALID_ARGUMENT",
                        "UNIMPLEMENTED"):
            self.assertGreater(self.outcomes[outcome], REQUESTS // 100, outcome)


if __name__ == "__main__":
    unittest.main(verbosity=2)
