"""W3C Trace Context: accepted, a span of the call's own in reply, report and log; malformed is ignored."""

import json
import os
import re
import subprocess
import unittest

import grpc
import numpy as np

from harness import contract
from harness.cases import simple_case
from harness.contract import pb
from harness.server import SLOWNESS, Attnd, wait_until

T = contract.TIMEOUT_S
ATTN = os.environ.get("ATTN")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{PARENT}-01"
SPAN = re.compile(f"00-{TRACE}-([0-9a-f]{{16}})-01")


def trailing(call):
    """Values of traceparent in the trailing metadata."""
    return [value for key, value in call.trailing_metadata() if key == "traceparent"]


class TraceTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Attnd("--log-level=debug", "--log-format=json"))
        cls.stub = cls.server.stub()
        cls.case = simple_case(np.random.default_rng(8))
        cls.request = cls.case.forward_request()

    def forward(self, *values):
        """(reply, traceparent values of its trailing metadata)."""
        metadata = [("traceparent", value) for value in values]
        reply, call = self.stub.Forward.with_call(self.request, timeout=T, metadata=metadata)
        return reply, trailing(call)

    def span_of(self, values):
        self.assertEqual(len(values), 1, values)
        match = SPAN.fullmatch(values[0])
        self.assertTrue(match, values[0])
        self.assertNotEqual(match.group(1), PARENT)
        return match.group(1)

    def logged(self, span):
        """The log's line of a call, by its span."""
        def find():
            for line in self.server.log().splitlines():
                record = json.loads(line)
                if record.get("span_id") == span:
                    return record
            return None
        return wait_until(find, f"a line with span {span}", 10, self.server.process)

    def test_reply_report_and_log_agree(self):
        reply, values = self.forward(HEADER)
        span = self.span_of(values)
        self.assertEqual((reply.report.trace_id, reply.report.span_id), (TRACE, span))
        record = self.logged(span)
        self.assertEqual((record["trace_id"], record["id"]), (TRACE, reply.report.request_id))
        again, values = self.forward(HEADER)
        self.assertNotEqual(self.span_of(values), span)

    def test_streams(self):
        header, payloads = self.case.forward()
        call = self.stub.ForwardStream(contract.stream_requests(header, payloads), timeout=T,
                                       metadata=[("traceparent", HEADER)])
        _, _, report = contract.collect_stream(call)
        self.assertEqual(report.span_id, self.span_of(trailing(call)))

    def test_plan_and_info(self):
        for method, request in ((self.stub.Plan, self.case.plan_request()),
                                (self.stub.GetServerInfo, pb.GetServerInfoRequest())):
            _, call = method.with_call(request, timeout=T, metadata=[("traceparent", HEADER)])
            self.assertEqual(self.logged(self.span_of(trailing(call)))["trace_id"], TRACE)

    def test_refusals_have_it_too(self):
        request = self.case.forward_request()
        request.header.shape.num_heads = 0
        with self.assertRaises(grpc.RpcError) as refused:
            self.stub.Forward(request, timeout=T, metadata=[("traceparent", HEADER)])
        self.assertEqual(refused.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        record = self.logged(self.span_of(trailing(refused.exception)))
        self.assertEqual(record["code"], "INVALID_ARGUMENT")

    def test_malformed_or_repeated_is_ignored(self):
        for values in ([], ["rubbish"], [HEADER + "-00"], [HEADER.upper()], ["ff" + HEADER[2:]],
                       [f"00-{'0' * 32}-{PARENT}-01"], [f"00-{TRACE}-{'0' * 16}-01"],
                       [HEADER, HEADER], ["x" * 4000]):
            with self.subTest(values=values):
                reply, answered = self.forward(*values)
                self.assertEqual(answered, [])
                self.assertEqual((reply.report.trace_id, reply.report.span_id), ("", ""))

    def test_a_later_version_is_read_as_the_first(self):
        self.span_of(self.forward(f"01-{TRACE}-{PARENT}-01-more")[1])


@unittest.skipUnless(ATTN, "without the client")
class ClientTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Attnd("--log-level=debug", "--log-format=json"))

    def attn(self, *arguments, status=0, environment=None, kind="forward"):
        done = subprocess.run(
            [ATTN, kind, f"--server={self.server.target}", "--seqlen-q=16", *arguments,
             *([] if kind == "plan" else ["--random"])],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            timeout=60 * SLOWNESS, env={**os.environ, **(environment or {})})
        self.assertEqual(done.returncode, status, done.stderr)
        return done

    def test_flag_and_environment(self):
        other = "1" * 32
        for arguments, environment, trace in (
                (["--traceparent", HEADER], {}, TRACE),
                ([], {"TRACEPARENT": HEADER}, TRACE),
                (["--traceparent", f"00-{other}-{PARENT}-00"], {"TRACEPARENT": HEADER}, other),
                ([], {"TRACEPARENT": "malformed"}, ""),
                ([], {"TRACEPARENT": ""}, ""),
                (["--streaming", "always"], {"TRACEPARENT": HEADER}, TRACE)):
            for kind in ("forward", "backward"):
                with self.subTest(arguments=arguments, environment=environment, kind=kind):
                    done = self.attn("--json", *arguments, environment=environment, kind=kind)
                    traces = set(re.findall(r'"trace_?[iI]d": ?"([0-9a-f]{32})"', done.stdout))
                    self.assertEqual(traces, {trace} if trace else set())
        self.assertIn(TRACE, self.attn("--traceparent", HEADER).stdout)

    def test_a_malformed_flag_is_wrong_usage(self):
        done = self.attn("--traceparent", HEADER[:-1], status=2)
        self.assertIn("--traceparent", done.stderr)
        self.assertIn(HEADER[:-1], done.stderr)

    def test_plan(self):
        self.attn("--traceparent", HEADER, kind="plan")
        wait_until(lambda: any('"method":"Plan"' in line and TRACE in line
                               for line in self.server.log().splitlines()),
                   "Plan is logged with its trace", 10, self.server.process)


if __name__ == "__main__":
    unittest.main(verbosity=2)
