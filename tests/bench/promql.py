#!/usr/bin/env python3
"""Every PromQL expression of every panel, rule and alert, against the real Prometheus and servers under
load: each parses, every series it names exists, and it has samples with the labels it uses."""

import collections
import sys

import observe

arguments = observe.parse(__doc__)

import numpy as np  # noqa: E402

from harness import queries  # noqa: E402
from harness.load import Load, mixed_requests  # noqa: E402
from harness.prometheus import RULES, Prometheus, promtool  # noqa: E402
from harness.server import Attnd, wait_until  # noqa: E402


def run(servers):
    requests = mixed_requests(np.random.default_rng(3))
    with Load(servers[0], requests, pause=0.005), Load(servers[1], requests, pause=0.005), \
            Prometheus([f"127.0.0.1:{s.metrics_port}" for s in servers]) as prometheus:
        wait_until(lambda: queries.all_recorded(prometheus), "every recorded series has samples", 60,
                   prometheus.process)
        known = queries.known_series(*(s.metrics() for s in servers))
        return [(q, queries.problems(q, prometheus, known))
                for q in queries.from_dashboards() + queries.from_rules()]


def main():
    if not arguments.fake_gpu_server:
        sys.exit("promql: --fake-gpu-server is needed")
    with Attnd("--canary-interval=500ms") as plain, \
            Attnd("--canary-interval=500ms", program=arguments.fake_gpu_server) as gpus:
        results = run([plain, gpus])
    table = collections.OrderedDict()
    for query, problems in results:
        row = table.setdefault(query.source, {"titles": set(), "all": 0, "good": 0})
        row["titles"].add(query.title)
        row["all"] += 1
        row["good"] += not problems
        for problem in problems:
            print(f"{query.source}: {query.title}: {problem}\n    {query.expression}")
    print(f"{'source':<20} {'panels or rules':>15} {'expressions':>12} {'passing':>8}")
    for source, row in table.items():
        print(f"{source:<20} {len(row['titles']):>15} {row['all']:>12} {row['good']:>8}")
    status, output = promtool("test", "rules", RULES / "alerts_test.yml")
    print(f"promtool test rules: {'passed' if status == 0 else output}")
    good = sum(row["good"] for row in table.values())
    observe.finish("promql", f"{good} of {len(results)} expressions, promtool "
                   f"{'passed' if status == 0 else 'failed'}", "all, passed",
                   good == len(results) and status == 0)


if __name__ == "__main__":
    main()
