"""The attn command line against a real server: results, JSON, files, exit statuses."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import unittest

import numpy as np

from harness import contract
from harness.long_calls import wait_running
from harness.server import SLOWNESS, Attnd, absent_cuda_paths, wait_idle

ATTN = os.environ.get("ATTN", "attn")
FIXTURES = pathlib.Path(os.environ.get("ATTN_FIXTURES", contract.ROOT / "tests/fixtures"))
T = 60.0 * SLOWNESS


def read_safetensors(path):
    data = pathlib.Path(path).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    kinds = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}
    return {name: np.frombuffer(data[8 + size + entry["data_offsets"][0]:
                                     8 + size + entry["data_offsets"][1]], kinds[entry["dtype"]])
            .reshape(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


class CliTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Attnd("--executor-workers=1",
                                                 "--max-inflight-requests=3"))
        options = json.loads((FIXTURES / "fixture.json").read_text())["options"]
        lengths = ",".join(map(str, options["seqlens_k"]))
        cls.fixture = ["--input", str(FIXTURES / "minilm_inputs.safetensors"),
                       "--seqlens-q", lengths, "--seqlens-k", lengths]
        cls.expected = str(FIXTURES / "minilm_expected.safetensors")

    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="attn_cli_"))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)

    def command(self, *arguments, server=None):
        arguments = [str(a) for a in arguments]
        if arguments[0] not in ("merge", "version", "--help"):
            arguments += ["--server", server or self.server.target]
        return [ATTN, *arguments]

    def attn(self, *arguments, status=0, server=None):
        done = subprocess.run(self.command(*arguments, server=server), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=T, text=True,
                              env={**os.environ, "LC_ALL": "C.UTF-8"})
        self.assertEqual(done.returncode, status, f"{arguments}\n{done.stdout}\n{done.stderr}")
        if status not in (0, 4):
            self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        return done

    # --------------------------------------------------------------------------- real input

    def test_fixture_forward_and_backward_pass_the_check(self):
        for command, names in (("forward", ("out", "lse")), ("backward", ("dq", "dk", "dv"))):
            with self.subTest(command):
                done = self.attn(command, *self.fixture, "--check", self.expected)
                for name in names:
                    self.assertIn(name, done.stdout)
                self.assertIn("flash_cpu", done.stdout)

    def test_check_finds_a_difference(self):
        self.attn("forward", *self.fixture, "--check", self.expected, "--causal", status=4)
        self.attn("forward", *self.fixture, "--check", self.expected, "--tolerance", "0", status=4)

    def test_json(self):
        done = self.attn("forward", *self.fixture, "--check", self.expected, "--json")
        document = json.loads(done.stdout)
        text = json.dumps(document)
        for word in ("flash_cpu", "DEVICE_KIND_CPU", "compulsoryBytes", "kernelNs"):
            self.assertIn(word, text)
        json.loads(self.attn("backward", *self.fixture, "--json").stdout)
        json.loads(self.attn("plan", "--seqlen-q", "2048", "--causal", "--json").stdout)
        json.loads(self.attn("status", "--json").stdout)

    def test_streaming_and_unary_write_the_same_file(self):
        files = []
        for mode in ("always", "never"):
            files.append(self.directory / f"{mode}.safetensors")
            self.attn("forward", *self.fixture, "--streaming", mode, "--output", files[-1])
        first, second = map(read_safetensors, files)
        for name in ("out", "lse"):
            np.testing.assert_array_equal(first[name], second[name])

    def test_outputs_equal_the_fixture(self):
        file = self.directory / "grads.safetensors"
        self.attn("backward", *self.fixture, "--output", file)
        got, expected = read_safetensors(file), read_safetensors(self.expected)
        for name in ("dq", "dk", "dv"):
            scale = np.abs(expected[name]).max()
            self.assertLess(np.abs(got[name] - expected[name]).max(), 2e-3 * scale, name)

    def test_npy_round_trip(self):
        rng = np.random.default_rng(1)
        q, k, v = (rng.standard_normal((1, 12, 2, 8)).astype(np.float32) for _ in range(3))
        for name, values in zip("qkv", (q, k, v)):
            np.save(self.directory / f"{name}.npy", values)
        self.attn("forward", *[x for n in "qkv" for x in (f"--{n}", self.directory / f"{n}.npy")],
                  "--causal", "--output", self.directory / "results")
        out = np.load(self.directory / "results" / "out.npy")
        lse = np.load(self.directory / "results" / "lse.npy")
        np.testing.assert_allclose(out[:, 0], v[:, 0], rtol=1e-5)  # the first row sees one key
        self.assertEqual(lse.shape, (1, 2, 12))

    # ----------------------------------------------------------------------------- merging

    def test_merge_of_two_halves_is_the_whole(self):
        whole = self.directory / "whole.safetensors"
        inputs = self.directory / "inputs.safetensors"
        self.attn("forward", "--random", "--seqlen-q", "30", "--seqlen-k", "64", "--num-heads", "2",
                  "--head-dim", "16", "--save-inputs", inputs, "--output", whole)
        tensors = read_safetensors(inputs)
        parts = []
        for index, keys in enumerate((slice(0, 20), slice(20, 64))):
            for name in "qkv":
                values = tensors[name] if name == "q" else tensors[name][:, keys]
                np.save(self.directory / f"{name}{index}.npy", np.ascontiguousarray(values))
            parts.append(self.directory / f"part{index}.safetensors")
            self.attn("forward", *[x for n in "qkv" for x in (
                f"--{n}", self.directory / f"{n}{index}.npy")], "--out-dtype", "fp32",
                "--output", parts[-1])
        merged = self.directory / "merged.safetensors"
        self.attn("merge", *parts, "--output", merged)
        got, expected = read_safetensors(merged), read_safetensors(whole)
        np.testing.assert_allclose(got["out"], expected["out"], atol=2e-6)
        np.testing.assert_allclose(got["lse"], expected["lse"], atol=1e-5)

    # -------------------------------------------------------------------------- plan, status

    def test_plan_shows_the_picture(self):
        done = self.attn("plan", "--seqlen-q", "8192", "--num-heads", "8", "--head-dim", "64",
                         "--causal")
        self.assertIn("flash_cpu", done.stdout)
        self.assertIn("67,108,864", done.stdout)  # 8192 squared: score entries of a head
        for line in done.stdout.splitlines():
            self.assertLessEqual(len(line), 100, line)

    def test_plan_of_what_flash_cannot_take(self):
        done = self.attn("plan", "--head-dim", "264")
        self.assertIn("standard_cpu", done.stdout)
        self.assertIn("HEAD_DIM_UNSUPPORTED", done.stdout)

    def test_status(self):
        done = self.attn("status")
        for word in ("flash_cpu", "standard_cpu"):
            self.assertIn(word, done.stdout)
        for path, reason in absent_cuda_paths().items():
            line = next(line for line in done.stdout.splitlines() if line.split()[:1] == [path])
            self.assertIn(reason, line)

    # ------------------------------------------------------------------------- exit statuses

    def test_usage(self):
        self.attn("forward", "--no-such-flag", status=2)
        self.attn("forward", status=2)  # neither --random nor files
        self.attn("forward", "--input", self.directory / "missing.safetensors", status=2)
        self.attn("forward", "--random", "--policy", "flash_tpu", "--deadline", "soon", status=2)
        (self.directory / "bad.npy").write_bytes(b"\x93NUMPY but not really")
        self.attn("forward", "--q", self.directory / "bad.npy", "--k", self.directory / "bad.npy",
                  "--v", self.directory / "bad.npy", status=2)
        self.attn("--help")
        self.attn("version")

    def test_unreachable(self):
        done = self.attn("forward", "--random", "--deadline", "2s", "--retries", "0",
                         server="127.0.0.1:1", status=3)
        self.assertIn("127.0.0.1:1", done.stderr)
        self.attn("status", server=f"unix:{self.directory / 'none.sock'}", status=3)

    def test_refused(self):
        done = self.attn("forward", "--random", "--head-dim", "264", "--policy", "require-flash",
                         status=5)
        self.assertIn("HEAD_DIM_UNSUPPORTED", done.stderr)
        done = self.attn("forward", "--random", "--window-left", "-1", status=5)
        self.assertIn("window_left", done.stderr)
        self.attn("forward", "--random", "--policy", "flash_sm90", status=5)

    LONG = ("--random", "--seqlen-q", "32768", "--num-heads", "16", "--num-kv-heads", "1",
            "--head-dim", "8", "--dtype", "bf16")

    def test_deadline(self):
        self.attn("forward", *self.LONG, "--deadline", f"{int(1500 * SLOWNESS)}ms", status=7)
        wait_idle(self.server)

    def test_interrupt(self):
        child = subprocess.Popen(self.command("forward", *self.LONG), stdin=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            wait_running(self.server, 1)
            child.send_signal(signal.SIGINT)
            self.assertEqual(child.wait(T), 7)
        finally:
            child.kill()
            child.wait()
            child.stderr.close()
        wait_idle(self.server)

    def test_exhausted(self):
        stub = self.server.stub()
        from harness.long_calls import long_forward
        calls = [stub.Forward.future(long_forward(), timeout=T) for _ in range(3)]
        wait_running(self.server, 1, queued=2)
        self.attn("forward", "--random", "--seqlen-q", "16", "--retries", "0", status=6)
        for call in calls:
            call.cancel()
        wait_idle(self.server)


if __name__ == "__main__":
    unittest.main(verbosity=2)
