"""A real Prometheus that scrapes the test's servers with the configuration and rules of deploy/."""

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request

import yaml

from harness.server import SLOWNESS, wait_until

DEPLOY = pathlib.Path(__file__).resolve().parents[3] / "deploy"
RULES = DEPLOY / "prometheus"
PROMETHEUS = os.environ.get("ATTN_PROMETHEUS") or shutil.which("prometheus")
PROMTOOL = os.environ.get("ATTN_PROMTOOL") or shutil.which("promtool")


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def shorten(text, seconds):
    """Rules with every range of minutes as `seconds` and every `for` as half of that, so that a test
    need not wait for minutes. Ranges of a day stay."""
    text = re.sub(r"\[\d+m\]", f"[{seconds}s]", text)
    return re.sub(r"for: \d+m", f"for: {max(1, seconds // 2)}s", text)


class Prometheus:
    """Prometheus on a free port; a context manager. `targets`: host:port of each metrics page.
    `interval`: of scrapes and of rules. `window`: see shorten(); None leaves the rules as they are."""

    def __init__(self, targets, interval="1s", window=None):
        if not PROMETHEUS or not PROMTOOL:
            raise AssertionError("prometheus and promtool are needed (package prometheus)")
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="attn_prometheus_"))
        config = yaml.safe_load((RULES / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": interval, "evaluation_interval": interval}
        (job,) = config["scrape_configs"]
        job["static_configs"] = [{"targets": list(targets)}]
        (self.directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        for name in config["rule_files"]:
            text = (RULES / name).read_text()
            (self.directory / name).write_text(text if window is None else shorten(text, window))
        self.log_path = self.directory / "log"
        self.process = None

    def __enter__(self):
        for _ in range(5):  # another process may take the port first
            self.port = _free_port()
            with open(self.log_path, "wb") as log:
                self.process = subprocess.Popen(
                    [PROMETHEUS, f"--config.file={self.directory}/prometheus.yml",
                     f"--storage.tsdb.path={self.directory}/data",
                     f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn"],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
            try:
                wait_until(self._ready, "Prometheus is ready", 30, self.process)
                return self
            except AssertionError:
                self._stop()
                if "address already in use" not in self.log():
                    break
        log = self.log()
        shutil.rmtree(self.directory, ignore_errors=True)
        raise AssertionError(f"Prometheus did not start:\n{log}")

    def __exit__(self, *_):
        self._stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _ready(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5) as reply:
                return reply.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def log(self):
        return self.log_path.read_text(errors="replace")

    def _api(self, path, **parameters):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/api/v1/{path}",
                                         data=urllib.parse.urlencode(parameters).encode())
        try:
            with urllib.request.urlopen(request, timeout=30 * SLOWNESS) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            answer = json.load(error)
        if answer["status"] != "success":
            raise ValueError(answer["error"])
        return answer["data"]

    def query(self, expression):
        """[(labels, value)] at this moment. ValueError: it does not parse or cannot be evaluated."""
        data = self._api("query", query=expression)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(sample["metric"], float(sample["value"][1])) for sample in data["result"]]

    def value(self, expression):
        """Of an expression with one sample; None where there is none."""
        samples = self.query(expression)
        if len(samples) > 1:
            raise ValueError(f"{expression} has {len(samples)} samples")
        return samples[0][1] if samples else None

    def alerts(self, state="firing"):
        """Names of the alerts in that state."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/alerts",
                                    timeout=30 * SLOWNESS) as reply:
            alerts = json.load(reply)["data"]["alerts"]
        return {a["labels"]["alertname"] for a in alerts if a["state"] == state}


def promtool(*arguments, cwd=None):
    """(exit status, output) of promtool."""
    done = subprocess.run([PROMTOOL, *map(str, arguments)], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
                          cwd=cwd)
    return done.returncode, done.stdout
