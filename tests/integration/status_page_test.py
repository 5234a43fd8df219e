"""The status page and its JSON over HTTP, and the HTTP side as a whole: read-only."""

import http.client
import json
import re
import socket
import time
import unittest

import numpy as np

from harness import contract
from harness.cases import simple_case
from harness.contract import pb
from harness.load import send_hostile
from harness.server import SLOWNESS, Attnd, has_gpu, wait_until

PATHS = ("flash_sm90", "flash_sm80", "standard_cuda", "flash_cpu", "standard_cpu")


def ask(port, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        reply = connection.getresponse()
        return reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read()
    finally:
        connection.close()


def status(server):
    code, headers, body = ask(server.metrics_port, "GET", "/status.json")
    assert code == 200 and headers["content-type"] == "application/json", (code, headers)
    return json.loads(body)


def settled(server, condition, what, timeout=15):
    """/status.json once `condition` holds; it may be half a second old."""
    seen = []

    def reached():
        seen.append(status(server))
        return condition(seen[-1])

    wait_until(reached, what, timeout, server.process)
    return seen[-1]


class HttpTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Attnd())
        cls.port = cls.server.metrics_port

    def test_one_self_contained_document(self):
        code, headers, body = ask(self.port, "GET", "/")
        self.assertEqual(code, 200)
        self.assertEqual(headers["content-type"], "text/html; charset=utf-8")
        self.assertEqual(headers["x-content-type-options"], "nosniff")
        self.assertEqual(headers["cache-control"], "no-store")
        text = body.decode()
        nonce = re.search(r"script-src 'nonce-([0-9a-f]{32})'", headers["content-security-policy"])[1]
        self.assertEqual(text.count(f'nonce="{nonce}"'), 2)  # the style and the script
        self.assertNotIn("@", re.sub(r"@media", "", text))  # nothing is left to fill in
        for directive in ("default-src 'none'", f"style-src 'nonce-{nonce}'", "connect-src 'self'",
                          "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"):
            self.assertIn(directive, headers["content-security-policy"])
        self.assertNotIn("unsafe", headers["content-security-policy"])
        self.assertEqual(re.findall(r"https?://[^\s'\"]+", text), ["http://www.w3.org/2000/svg"])  # a name
        self.assertEqual(re.findall(r"""(?:src|href)=["']([^"']*)""", text), ["data:,"])
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            self.assertNotIn(way, text)
        self.assertNotIn(nonce, ask(self.port, "GET", "/")[1]["content-security-policy"])  # a new one each time

    def test_read_only(self):
        for path in ("/", "/status.json", "/metrics", "/healthz", "/readyz", "/nothing"):
            for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "PROPFIND"):
                code, headers, _ = ask(self.port, method, path, body="x=1" if method == "POST" else None,
                                       headers={"Origin": "http://evil.example"})
                self.assertEqual((code, headers.get("allow")), (405, "GET, HEAD"), (method, path))
                self.assertNotIn("access-control-allow-origin", headers)
        for path in ("/nothing", "/index.html", "/status.json/x", "/../etc/passwd", "/%2e%2e/etc/passwd"):
            self.assertIn(ask(self.port, "GET", path)[0], (400, 404), path)

    def test_head(self):
        for path in ("/", "/metrics", "/healthz", "/status.json"):
            with socket.create_connection(("127.0.0.1", self.port), timeout=20) as raw:
                raw.sendall(f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                reply = b""
                while data := raw.recv(1 << 16):
                    reply += data
            head, _, body = reply.partition(b"\r\n\r\n")
            self.assertTrue(head.startswith(b"HTTP/1.1 200 OK"), path)
            self.assertGreater(int(re.search(rb"Content-Length: (\d+)", head)[1]), 0)
            self.assertEqual(body, b"", path)

    def test_silent_connections_do_not_keep_a_probe_waiting(self):
        """A browser opens some before it has something to ask."""
        silent = [socket.create_connection(("127.0.0.1", self.port)) for _ in range(6)]
        start = time.monotonic()
        self.assertEqual(ask(self.port, "GET", "/healthz")[0], 200)
        self.assertLess(time.monotonic() - start, 5 * SLOWNESS)
        for raw in silent:
            raw.close()

    def test_plans_say_what_forward_does(self):
        plans = status(self.server)["plans"]
        if not has_gpu():
            self.assertEqual(plans["devices"], ["cpu"])
        self.assertEqual(len(plans["cells"]), len(plans["shapes"]) * 2 * 3 * len(plans["devices"]))
        stub, seen = self.server.stub(), 0
        for cell in plans["cells"]:
            if plans["shapes"][cell["shape"]]["name"] != "decode" or not cell["takes_calls"]:
                continue
            heads, dim = (32, 8), 128
            request = pb.PlanRequest(**{"pass": pb.PASS_FORWARD if cell["pass"] == "forward" else pb.PASS_BACKWARD})
            header = request.header
            header.shape.layout = pb.LAYOUT_BSHD
            header.shape.num_heads, header.shape.num_kv_heads = heads
            header.options.causal = True
            for name, tokens, n in (("q", 1, heads[0]), ("k", 4096, heads[1]), ("v", 4096, heads[1])):
                tensor = getattr(header, name)
                tensor.dtype = pb.DType.Value("DTYPE_" + cell["dtype"].upper())
                tensor.shape.extend([8, tokens, n, dim])
            plan = stub.Plan(request, timeout=contract.TIMEOUT_S)
            self.assertEqual((cell["path"], cell["kernel"]), (plan.path, plan.kernel))
            self.assertEqual(cell["standard_bytes"], plan.traffic.standard_bytes)
            self.assertEqual(cell["tile_bytes"], plan.traffic.tile_bytes)
            self.assertEqual([(r["path"], r["reason"]) for r in plans["reasons"][cell["reasons"]]],
                             [(r.path, pb.Reason.Name(r.reason)[len("REASON_"):]) for r in plan.rejections])
            seen += 1
        self.assertEqual(seen, 6)


class CallsTest(unittest.TestCase):
    def setUp(self):
        self.server = self.enterContext(Attnd("--canary-interval=200ms"))
        self.port = self.server.metrics_port

    def test_before_the_first_call_and_after(self):
        s = status(self.server)
        self.assertEqual((s["calls"], s["shapes"], s["totals"]["paths"], s["totals"]["fallbacks"]), ([], [], [], []))
        self.assertEqual(s["totals"]["requests"], 0)
        self.assertEqual([p["path"] for p in s["paths"]], list(PATHS))
        self.assertTrue(s["server"]["serving"])
        for path in s["paths"]:
            if not path["available"]:
                self.assertTrue(path["reasons"] and path["reasons"][0]["sentence"], path)
        for path in ("flash_cpu", "standard_cpu"):
            entry = next(p for p in s["paths"] if p["path"] == path)
            self.assertEqual(entry["self_test_failed"], [])
            self.assertGreater(entry["self_test_passed"], 0)
        s = settled(self.server, lambda s: s["canary"]["runs"]["ok"] >= 2 and s["canary"]["last"], "the canary shows")
        self.assertTrue(all(last["ok"] for last in s["canary"]["last"]))
        settled(self.server, lambda s: len(s["history"]["age_s"]) >= 2, "the history goes on without calls")
        self.check_calls_and_their_reports()

    def check_calls_and_their_reports(self):
        case = simple_case(np.random.default_rng(1), seqlen_q=64, seqlen_k=64, head_dim=64)
        reply = self.server.stub().Forward(case.forward_request(), timeout=contract.TIMEOUT_S)
        details = send_hostile(self.server)
        s = settled(self.server, lambda s: len(s["calls"]) == 2, "both calls show")
        refused, served = s["calls"]
        self.assertEqual(refused["error"], details)  # the text as it is, after JSON
        self.assertIn("<img", refused["error"])
        report = served["report"]
        self.assertEqual(served["id"], reply.report.request_id)
        self.assertEqual((report["path"], report["kernel"]), (reply.report.path, reply.report.kernel))
        self.assertEqual(report["times"]["kernel_ns"], reply.report.times.kernel_ns)
        self.assertEqual(report["traffic"]["standard_bytes"], reply.report.traffic.standard_bytes)
        self.assertEqual(len(report["rejections"]), len(reply.report.rejections))
        (shape,) = s["shapes"]
        self.assertEqual((shape["calls"], shape["tile_bytes"]), (1, reply.report.traffic.tile_bytes))
        self.assertEqual((shape["shape"]["seqlen_q"], shape["shape"]["head_dim"]), (64, 64))
        self.assertEqual(s["totals"]["codes"], {"OK": 1, "INVALID_ARGUMENT": 1})
        s = settled(self.server, lambda s: sum(s["history"]["calls"]) == 1, "the call is in the history")
        self.assertEqual(sum(s["history"]["flash_calls"]), s["totals"]["flash"]["flash_calls"])
        raw = ask(self.port, "GET", "/status.json")[2]
        self.assertNotIn(b"<", raw)
        raw.decode("ascii")


if __name__ == "__main__":
    unittest.main(verbosity=2)
