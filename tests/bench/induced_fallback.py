#!/usr/bin/env python3
"""Switches flash off in a live server, by its settings and SIGHUP, and on again: the share, the reason,
the alert and what the status page shows must follow. Rules and alerts are those of deploy/ with minutes
shortened to seconds."""

import json
import signal
import time
import urllib.request

import observe

arguments = observe.parse(__doc__, window=(6, "seconds that stand for each range of minutes"))

import numpy as np  # noqa: E402

from harness.cases import simple_case  # noqa: E402
from harness.load import Load  # noqa: E402
from harness.prometheus import Prometheus  # noqa: E402
from harness.server import Attnd, wait_until  # noqa: E402

ALERT = "AttnFlashShareLow"
REASON = 'sum by (reason) (rate(attn_fallbacks_total[3s])) > 0'
LIMIT_S = 60


class Page:
    """What the status page shows, from its own JSON."""

    def __init__(self, server):
        with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/status.json", timeout=20) as reply:
            status = json.load(reply)
        history = status["history"]
        recent = [i for i, age in enumerate(history["age_s"]) if age < 4 and history["calls"][i] > 0]
        calls = sum(history["calls"][i] for i in recent)
        self.share = sum(history["flash_calls"][i] for i in recent) / calls if calls else None
        self.last = status["calls"][0]["report"]["path"] if status["calls"] else None
        self.plans = {cell.get("path") for cell in status["plans"]["cells"]}
        self.fallbacks = {f["reason"]: f["calls"] for f in status["totals"]["fallbacks"]}
        self.off = {path["path"]: [r["reason"] for r in path["reasons"]] for path in status["paths"]}

    def flash_on(self):
        return (self.share == 1 and self.last == "flash_cpu" and "flash_cpu" in self.plans and
                self.off["flash_cpu"] == [])

    def flash_off(self):
        return (self.share == 0 and self.last == "standard_cpu" and "flash_cpu" not in self.plans and
                self.off["flash_cpu"] == ["DISABLED_BY_CONFIG"] and
                list(self.fallbacks) == ["DISABLED_BY_CONFIG"])


class State:
    """What a dashboard shows."""

    def __init__(self, prometheus, server):
        self.page = Page(server)
        self.share = prometheus.value("sum(instance:attn_flash_flops:ratio_rate5m)")
        self.reasons = sorted(labels["reason"] for labels, _ in prometheus.query(REASON))
        self.alert = ("firing" if ALERT in prometheus.alerts() else
                      "pending" if ALERT in prometheus.alerts("pending") else "quiet")

    def row(self, what, seconds):
        share = "-" if self.share is None else f"{self.share:.3f}"
        page = "-" if self.page.share is None else f"{self.page.share:.3f}"
        print(f"{what:<34} {seconds:>8} {share:>8} {page:>8}  {','.join(self.reasons) or '-':<20} {self.alert}",
              flush=True)


def settle(prometheus, server, condition, what, start):
    """Waits for a state; (state, seconds since `start`)."""
    states = []

    def reached():
        states.append(State(prometheus, server))
        return condition(states[-1])

    wait_until(reached, what, LIMIT_S, prometheus.process)
    seconds = time.monotonic() - start
    states[-1].row(what, f"{seconds:.1f} s")
    return states[-1], seconds


def main():
    server = Attnd("--canary-interval=0s")
    config = server.directory / "attnd.toml"
    config.write_text("")
    server.command.append(f"--config={config}")

    def switch(text):
        config.write_text(text)
        times = server.log().count("settings read again")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: server.log().count("settings read again") > times, "SIGHUP", 10,
                   server.process)
        return time.monotonic()

    requests = [("Forward", simple_case(np.random.default_rng(2), seqlen_q=64, seqlen_k=64,
                                        head_dim=64).forward_request())]
    with server, Load(server, requests, pause=0.01) as load, \
            Prometheus([f"127.0.0.1:{server.metrics_port}"], interval="500ms",
                       window=arguments.window) as prometheus:
        print(f"{'':<34} {'after':>8} {'share':>8} {'page':>8}  {'reasons':<20} {ALERT}")
        settle(prometheus, server,
               lambda s: s.share == 1 and s.alert == "quiet" and not s.reasons and s.page.flash_on(),
               "flash on: share 1, no reason", time.monotonic())
        start = switch('disable-path = ["flash_cpu"]\n')
        settle(prometheus, server, lambda s: s.reasons == ["DISABLED_BY_CONFIG"],
               "flash off: the reason shows", start)
        settle(prometheus, server, lambda s: s.page.flash_off(), "flash off: the status page", start)
        off, _ = settle(prometheus, server,
                        lambda s: s.alert == "firing" and s.share == 0 and s.page.flash_off(),
                        "flash off: share 0, alert", start)
        start = switch("")
        on, _ = settle(prometheus, server,
                       lambda s: s.share == 1 and s.alert == "quiet" and not s.reasons and s.page.flash_on(),
                       "flash on again", start)
        load.stop()
        codes = load.sent()
    lost = sum(n for code, n in codes.items() if code != "OK")
    print(f"calls: {codes}")
    observe.finish(
        "induced-fallback",
        f"share 1 to {off.share:g} and back, {','.join(off.reasons)}, alert {off.alert} and quiet again, "
        f"status page {off.page.share:g} to {on.page.share:g}, "
        f"{lost} of {sum(codes.values())} calls failed",
        "share 1, 0, 1, on the status page too; DISABLED_BY_CONFIG; the alert fires and ends; no call fails",
        off.share == 0 and off.page.flash_off() and on.page.flash_on() and
        off.reasons == ["DISABLED_BY_CONFIG"] and lost == 0)


if __name__ == "__main__":
    main()
