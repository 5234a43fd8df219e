"""A real attnd process on free ports, always stopped."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import threading
import time

from harness import contract, metrics
from harness.contract import health_grpc, health_pb, pb, pb_grpc

ATTND = os.environ.get("ATTND", "attnd")
# Sanitizer builds are several times slower; every wait of the tests is stretched by this.
SLOWNESS = float(os.environ.get("ATTN_TEST_SLOWNESS", "1"))
START_S = 60.0 * SLOWNESS
STOP_S = 60.0 * SLOWNESS


def wait_until(condition, what, timeout=30.0, process=None):
    """Polls `condition` until it is true. Fails with `what` at the timeout or when `process` ends."""
    deadline = time.monotonic() + timeout * SLOWNESS
    pause = threading.Event()
    while True:
        result = condition()
        if result:
            return result
        if process is not None and process.poll() is not None:
            raise AssertionError(f"{what}: attnd ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout * SLOWNESS:.0f} s")
        pause.wait(0.005)


class Attnd:
    """attnd on 127.0.0.1:0 with `flags`; a context manager that stops it and checks that it left
    in good order (exit status 0, nothing from a sanitizer)."""

    def __init__(self, *flags, listen="127.0.0.1:0", env=None, expect_clean=True, program=None):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="attnd_test_"))
        self.ports_file = self.directory / "ports"
        self.log_path = self.directory / "log"
        self.expect_clean = expect_clean
        self.command = [program or ATTND, f"--listen={listen}", "--metrics-listen=127.0.0.1:0",
                        f"--ports-file={self.ports_file}", *flags]
        self.env = {**os.environ, **(env or {})}
        self.process = None
        self.channels = []

    def start(self):
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=subprocess.STDOUT, env=self.env)
        try:
            self.ports = wait_until(self._read_ports, "attnd writes its ports file", START_S,
                                    self.process)
        except BaseException:
            self._kill()
            raise AssertionError(f"attnd did not start: {self.log()}") from None
        return self

    def _read_ports(self):
        try:
            return json.loads(self.ports_file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    @property
    def port(self):
        return int(self.ports["listen"][0].rpartition(":")[2])

    @property
    def metrics_port(self):
        return int(self.ports["metrics"].rpartition(":")[2])

    @property
    def target(self):
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self):
        return self.process.pid

    def log(self):
        return self.log_path.read_text(errors="replace")

    def channel(self, target=None, options=(), credentials=None):
        chan = contract.channel(target or self.target, options, credentials)
        self.channels.append(chan)
        return chan

    def stub(self, **kwargs):
        return pb_grpc.AttentionStub(self.channel(**kwargs))

    def info(self):
        return self.stub().GetServerInfo(pb.GetServerInfoRequest(), timeout=contract.TIMEOUT_S)

    def health(self, service=""):
        stub = health_grpc.HealthStub(self.channel())
        return stub.Check(health_pb.HealthCheckRequest(service=service),
                          timeout=contract.TIMEOUT_S).status

    def metrics(self):
        return metrics.scrape(self.metrics_port)

    def _memory(self, name):
        for line in pathlib.Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"no {name}")

    def rss_bytes(self):
        return self._memory("VmRSS")

    def peak_rss_bytes(self):
        return self._memory("VmHWM")

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout=STOP_S):
        return self.process.wait(timeout)

    def alive(self):
        return self.process.poll() is None

    def _kill(self):
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def stop(self):
        """Stops attnd; returns its exit status."""
        for chan in self.channels:
            chan.close()
        self.channels = []
        try:
            if self.alive():
                self.terminate()
            return self.wait()
        finally:
            self._kill()

    def __enter__(self):
        return self.start()

    def __exit__(self, kind, *_):
        try:
            status = self.stop()
            log = self.log()
            if kind is None and self.expect_clean:
                if status != 0:
                    raise AssertionError(f"attnd exited with {status}:\n{log[-8000:]}")
                for word in ("AddressSanitizer", "LeakSanitizer", "runtime error:"):
                    if word in log:
                        raise AssertionError(f"a sanitizer spoke:\n{log[-16000:]}")
            elif kind is not None:
                print(f"--- log of attnd ---\n{log[-8000:]}", flush=True)
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)


INFLIGHT_GAUGES = ("attn_inflight_requests", "attn_inflight_bytes", "attn_queued_requests",
                   "attn_queued_bytes")


def wait_idle(server, timeout=30.0):
    """Waits until nothing is in flight or queued on the server, by its own gauges."""
    def idle():
        exposition = server.metrics()
        missing = [g for g in INFLIGHT_GAUGES if g not in exposition.names()]
        if missing:
            raise AssertionError(f"no gauges {missing}")
        return all(exposition.total(gauge) == 0 for gauge in INFLIGHT_GAUGES)

    wait_until(idle, "gauges return to 0", timeout, server.process)


def run_refused(*flags, listen="127.0.0.1:0", metrics="127.0.0.1:0", timeout=START_S, env=None):
    """Runs attnd where it must refuse to start: (exit status, what it printed)."""
    flags = list(flags)
    if not any(flag.startswith("--listen=") for flag in flags):
        flags.append(f"--listen={listen}")
    with tempfile.TemporaryDirectory(prefix="attnd_refused_") as directory:
        command = [ATTND, f"--metrics-listen={metrics}", f"--ports-file={directory}/ports", *flags]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=timeout, text=True,
                              env={**os.environ, **(env or {})})
        return done.returncode, done.stdout


@contextlib.contextmanager
def process_group(*popen_args, **popen_kwargs):
    """A child process that is killed on the way out."""
    child = subprocess.Popen(*popen_args, **popen_kwargs)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()


def absent_cuda_paths():
    """Why each CUDA path of this build is off on a host without a GPU: {path: reason}."""
    built = os.environ.get("ATTN_HAVE_CUDA") == "1"
    sm90 = os.environ.get("ATTN_HAVE_SM90") == "1"
    return {"flash_sm90": "NO_CUDA_DEVICE" if sm90 else "NOT_BUILT",
            "flash_sm80": "NO_CUDA_DEVICE" if built else "NOT_BUILT",
            "standard_cuda": "NO_CUDA_DEVICE" if built else "NOT_BUILT"}


def has_gpu():
    """Whether the host has an NVIDIA device."""
    return os.path.exists("/dev/nvidia0")
