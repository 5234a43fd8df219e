#!/usr/bin/env python3
"""The real Prometheus scrapes ten times a second while calls keep every core busy: no scrape may fail and
no request may be lost."""

import time

import observe

arguments = observe.parse(__doc__, seconds=(20, "how long"), threads=(4, "callers"))

import numpy as np  # noqa: E402

from harness.cases import simple_case  # noqa: E402
from harness.load import Load  # noqa: E402
from harness.prometheus import Prometheus  # noqa: E402
from harness.server import Attnd, wait_until  # noqa: E402

INTERVAL_MS = 100
# Prometheus may start a little late and ends between two scrapes.
LEAST_SHARE = 0.95


def main():
    rng = np.random.default_rng(4)
    requests = [("Forward", simple_case(rng, seqlen_q=s, seqlen_k=s, num_heads=4, num_kv_heads=4,
                                        head_dim=64).forward_request()) for s in (16, 512, 1024)]
    with Attnd() as server, Load(server, requests, threads=arguments.threads) as load, \
            Prometheus([f"127.0.0.1:{server.metrics_port}"], interval=f"{INTERVAL_MS}ms") as prometheus:
        wait_until(lambda: prometheus.value("up") == 1, "the first scrape", 10, prometheus.process)
        start = time.monotonic()
        busy = []
        while time.monotonic() < start + arguments.seconds:
            busy.append(server.metrics().total("attn_executor_running"))
            time.sleep(1)
        span = int(time.monotonic() - start)
        scrapes = prometheus.value(f"count_over_time(up[{span}s])")
        succeeded = prometheus.value(f"sum_over_time(up[{span}s])")
        longest = prometheus.value(f"max_over_time(scrape_duration_seconds[{span}s])")
        rate = prometheus.value(f"sum(rate(attn_executions_total[{span}s]))")
        load.stop()
        codes = load.sent()
        counted = server.metrics().total("attn_requests_total", method="Forward", code="OK")
    sent, answered = sum(codes.values()), codes.get("OK", 0)
    expected = span * 1000 / INTERVAL_MS
    failed = scrapes - succeeded
    print(f"{'scrapes in ' + str(span) + ' s':<38} {scrapes:>10.0f}   of {expected:.0f}")
    print(f"{'failed scrapes':<38} {failed:>10.0f}")
    print(f"{'longest scrape':<38} {longest * 1e3:>10.1f} ms")
    print(f"{'calls a second':<38} {rate:>10.1f}")
    print(f"{'workers busy, mean of samples':<38} {sum(busy) / len(busy):>10.2f}")
    print(f"{'requests sent':<38} {sent:>10}")
    print(f"{'answered OK':<38} {answered:>10}")
    print(f"{'counted by the server':<38} {counted:>10.0f}")
    observe.finish(
        "scrape-storm",
        f"{failed:.0f} of {scrapes:.0f} scrapes failed, {sent - answered} of {sent} requests lost",
        f"0 failed of at least {LEAST_SHARE:.0%} of {expected:.0f}; 0 lost; every reply counted",
        failed == 0 and scrapes >= LEAST_SHARE * expected and sent == answered == counted and rate > 0)


if __name__ == "__main__":
    main()
