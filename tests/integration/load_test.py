"""attn load against a real server: what it sends, measures, writes and exits with."""

import csv
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import unittest
from html.parser import HTMLParser

from harness.server import SLOWNESS, Attnd, absent_cuda_paths, wait_until

ATTN = os.environ.get("ATTN", "attn")
T = 120.0 * SLOWNESS
SMALL = ["--seqlen-q", "8", "--num-heads", "2", "--head-dim", "16"]
QUICK = ["--warm-up", "0", "--stability", "0"]


class Tags(HTMLParser):
    """Checks that tags nest, and collects them."""

    VOID = {"meta", "line", "path", "circle", "rect"}

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag in self.VOID:
            return
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


class LoadTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Attnd("--executor-workers=1"))

    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="attn_load_"))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)

    def command(self, *flags, small=True):
        return [ATTN, "load", "--server", self.server.target, *(SMALL if small else []),
                *map(str, flags)]

    def load(self, *flags, status=0, small=True):
        done = subprocess.run(self.command(*flags, small=small), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=T, text=True,
                              env={**os.environ, "LC_ALL": "C.UTF-8"})
        self.assertEqual(done.returncode, status, f"{flags}\n{done.stdout}\n{done.stderr}")
        return done

    def json(self, *flags, status=0, small=True):
        return json.loads(self.load(*flags, "--json", status=status, small=small).stdout)

    # ------------------------------------------------------------------------- what is sent

    def test_closed_loop_sends_as_many_calls_as_asked(self):
        before = self.server.metrics().total("attn_requests_total", method="Forward")
        document = self.json("--concurrency", 3, "--calls", 60, *QUICK)
        phase = document["phases"][0]
        self.assertEqual((phase["ok"], phase["failed"], phase["end"]), (60, 0, "calls"))
        self.assertFalse(phase["openLoop"])
        after = self.server.metrics().total("attn_requests_total", method="Forward")
        self.assertEqual(after - before, 61)  # and one to see that the server takes it
        self.assertEqual(phase["paths"][0]["path"], "flash_cpu")
        self.assertEqual(phase["paths"][0]["callShare"], 1)
        for path, reason in absent_cuda_paths().items():
            self.assertEqual(phase["rejections"][f"{path}:{reason}"], 60)

    def test_constant_rate_is_on_time(self):
        calls = self.directory / "calls.csv"
        phase = self.json("--rate", 50, "--arrivals", "constant", "--duration", "1s",
                          "--calls-csv", calls, *QUICK)["phases"][0]
        self.assertEqual(phase["offered"], 50)
        self.assertEqual(phase["ok"], 50)
        with open(calls, newline="", encoding="utf-8") as file:
            rows = sorted(csv.DictReader(file), key=lambda row: float(row["intended_s"]))
        self.assertEqual(len(rows), 50)
        for i, row in enumerate(rows):
            self.assertAlmostEqual(float(row["intended_s"]), i / 50, places=6)
            self.assertGreaterEqual(float(row["sent_s"]), float(row["intended_s"]))
            self.assertGreater(float(row["done_s"]), float(row["sent_s"]))
        self.assertEqual(len({row["trace_id"] for row in rows}), 50)

    def test_mix_follows_its_weights_and_verifies(self):
        mix = self.directory / "mix.json"
        mix.write_text(json.dumps({"entries": [
            {"name": "bf16", "weight": 3, "dtype": "bf16", "causal": True, "seqlen_q": 24},
            {"name": "grads", "weight": 1, "pass": "backward", "num_kv_heads": 1},
            {"name": "standard", "weight": 1, "policy": "force-standard", "softcap": 5}]}))
        document = self.json("--mix", mix, "--concurrency", 2, "--calls", 300, "--verify-every", 1,
                             *QUICK)
        phase = document["phases"][0]
        shares = {entry["name"]: entry["ok"] / 300 for entry in phase["entries"]}
        self.assertAlmostEqual(shares["bf16"], 0.6, delta=0.15)
        self.assertAlmostEqual(shares["grads"], 0.2, delta=0.12)
        self.assertEqual({path["path"] for path in phase["paths"]}, {"flash_cpu", "standard_cpu"})
        verification = document["verification"]
        self.assertEqual(verification["wrong"], 0)
        self.assertEqual(verification["replies"] + verification["skipped"], 300)
        self.assertGreater(verification["replies"], 200)
        self.assertEqual(set(verification["largestErrorOverBound"]),
                         {"out", "lse", "dq", "dk", "dv"})
        for ratio in verification["largestErrorOverBound"].values():
            self.assertLessEqual(ratio, 1)

    def test_trace_is_replayed(self):
        trace = self.directory / "trace.csv"
        trace.write_text("seconds,seqlen_q,causal\n100.0,8,true\n100.2,16,false\n100.4,8,true\n")
        document = self.json("--trace", trace, "--trace-speed", 2, *QUICK)
        phase = document["phases"][0]
        self.assertEqual([entry["ok"] for entry in phase["entries"]], [2, 1])
        self.assertAlmostEqual(phase["seconds"], 0.2, delta=0.01)

    def test_steps_change_the_rate(self):
        phase = self.json("--steps", "20:500ms,60:500ms", "--arrivals", "constant", "--window",
                          "500ms", *QUICK)["phases"][0]
        self.assertEqual([window["offered"] for window in phase["windows"]], [10, 30])

    def test_streaming_channels_and_every_stage(self):
        phase = self.json("--calls", 20, "--streaming", "always", "--channels", 2,
                          *QUICK)["phases"][0]
        self.assertEqual(phase["streamed"], 20)
        for stage in ("client", "wire", "parse", "gather", "kernel", "reply", "handler"):
            self.assertGreater(phase["stages"][stage], 0, stage)

    # --------------------------------------------------------------------------- what is found

    def test_sweep_writes_every_format(self):
        html, table = self.directory / "r.html", self.directory / "r.csv"
        metrics = f"http://127.0.0.1:{self.server.metrics_port}/metrics"
        done = self.load("--concurrency", "1,2", "--calls", 50, "--window", "10ms", "--pass",
                         "mixed", "--metrics", metrics, "--html", html, "--csv", table, *QUICK)
        for word in ("latency against load", "1 in flight", "2 in flight", "slowest calls",
                     "where the time of a call goes", "server metrics, growth", "attn_bytes_total"):
            self.assertIn(word, done.stdout)
        with open(table, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual([row["level"] for row in rows], ["1", "2"])
        self.assertEqual([row["ok"] for row in rows], ["50", "50"])
        page = Tags()
        page.feed(html.read_text(encoding="utf-8"))
        page.close()
        self.assertEqual(page.open, [])
        self.assertGreaterEqual(page.seen.count("svg"), 6)
        for tag in ("script", "link", "img", "iframe"):
            self.assertNotIn(tag, page.seen)
        self.assertFalse([a for a, _ in page.attributes if a in ("src", "href") or a[:2] == "on"])

    def test_metrics_are_differences(self):
        metrics = f"127.0.0.1:{self.server.metrics_port}"
        document = self.json("--calls", 30, "--metrics", metrics, *QUICK)
        self.assertEqual(
            document["metrics"]['attn_requests_total{code="OK",method="Forward"}'], 30)

    def test_slo_search_finds_a_rate(self):
        document = self.json("--slo", "p90<1s", "--rate", 20000, "--duration", "300ms",
                             "--warm-up", "0", "--max-in-flight", 2)
        self.assertGreater(document["slo"]["highestRate"], 1)
        rates = {phase["level"]: phase["metSlo"] for phase in document["phases"]}
        self.assertTrue(rates[document["slo"]["highestRate"]])
        self.assertGreaterEqual(len(rates), 2)
        self.load("--slo", "p50<1us", "--rate", 4, "--duration", "50ms", "--warm-up", "0", status=8)

    # ----------------------------------------------------------------------------- how it ends

    def test_ctrl_c_gives_the_report_so_far(self):
        html = self.directory / "r.html"

        def forwards():
            return self.server.metrics().total("attn_requests_total", method="Forward")

        before = forwards()
        process = subprocess.Popen(
            self.command("--rate", 100, "--duration", "10m", "--warm-up", "0", "--html", html,
                         "--progress", "--json"),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            wait_until(lambda: forwards() - before > 50, "the load runs", 60, process)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=T)
        finally:
            process.kill()
            process.wait()
        self.assertEqual(process.returncode, 7, err)
        phase = json.loads(out)["phases"][0]
        self.assertEqual(phase["end"], "interrupted")
        self.assertGreater(phase["ok"], 20)
        self.assertIn("interrupted", err)
        self.assertIn("in flight", err)
        self.assertIn("</html>", html.read_text(encoding="utf-8"))

    def test_exit_statuses(self):
        # Not steady: too few windows to say so.
        done = self.load("--calls", 5, "--warm-up", "0", status=8)
        self.assertIn("steadiness cannot be judged", done.stderr)
        # Refused before any load.
        done = self.load("--head-dim-v", 1000, "--calls", 5, *QUICK, status=5)
        self.assertIn("head_dim", done.stderr)
        # Nobody there.
        nobody = ["--server", "127.0.0.1:1", "--connect-timeout", "100ms"]
        done = subprocess.run([ATTN, "load", *nobody], capture_output=True, text=True, timeout=T)
        self.assertEqual(done.returncode, 3)
        # Files that cannot be used.
        self.load("--mix", self.directory / "none.json", status=2)
        self.load("--html", self.directory / "no" / "r.html", "--calls", 1, *QUICK, status=2)

    def test_until_stable_ends_early(self):
        # Three windows are never further than 200% from their mean: no machine can fail this.
        phase = self.json("--concurrency", 1, "--duration", "5m", "--window", "200ms", "--warm-up",
                          "200ms", "--until-stable", "--stability", "1000")["phases"][0]
        self.assertEqual(phase["end"], "stable")
        self.assertTrue(phase["stability"]["stable"])

    def test_failures_are_counted_not_retried(self):
        with Attnd("--executor-workers=1", "--max-inflight-requests=1") as tight:
            done = subprocess.run(
                [ATTN, "load", "--server", tight.target, "--seqlen-q", "64", "--concurrency", "4",
                 "--calls", "400", "--json", "--abort-errors", "100", *QUICK],
                capture_output=True, text=True, timeout=T)
            self.assertEqual(done.returncode, 8, done.stderr)
            phase = json.loads(done.stdout)["phases"][0]
            self.assertGreater(phase["failed"], 0)
            self.assertEqual(phase["ok"] + phase["failed"], 400)
            self.assertEqual(phase["failures"][0]["status"], "RESOURCE_EXHAUSTED")
            self.assertIn("calls failed", done.stderr)

    def test_abort_p99(self):
        done = self.load("--rate", 50, "--duration", "5m", "--window", "100ms", "--abort-p99",
                         "1us", *QUICK, status=8)
        self.assertIn("aborted: p99", done.stderr)


if __name__ == "__main__":
    unittest.main()
