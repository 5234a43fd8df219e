#!/usr/bin/env python3
"""A mixed forward and backward load on attnd by `attn load`: writes DIR/load.html and DIR/load.json.

usage: load.py [--out DIR] [--rates RATE,…] [--seconds N]
ATTND and ATTN name the programs. No bar: an example of what a load test shows."""

import argparse
import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "integration"))

import results  # noqa: E402
from harness import metrics  # noqa: E402
from harness.server import Attnd  # noqa: E402

ATTN = os.environ.get("ATTN", "attn")
# What NVML says of the devices; none without one.
SENSORS = ("attn_device_sm_clock", "attn_device_memory_clock", "attn_device_power",
           "attn_device_temperature", "attn_device_throttled", "attn_device_utilization",
           "attn_device_memory_used", "attn_device_memory_in_use", "attn_device_memory_retained")
METHOD = "attn load on load_mix.json, Poisson arrivals, client and server on one host"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=HERE / "results", type=pathlib.Path)
    parser.add_argument("--rates", default="50,100,200")
    parser.add_argument("--seconds", default=5, type=int)
    args = parser.parse_args()
    with Attnd() as server:
        done = subprocess.run(
            [ATTN, "load", "--server", server.target, "--mix", HERE / "load_mix.json", "--rate",
             args.rates, "--duration", f"{args.seconds}s", "--warm-up", "1s", "--stability", "0",
             "--channels", "4", "--metrics", f"http://127.0.0.1:{server.metrics_port}/metrics",
             "--html", args.out / "load.html", "--json"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240)
        samples = metrics.scrape(server.metrics_port).samples
        sensors = [dict(name=name, value=value, **dict(labels))
                   for (name, labels), value in samples.items() if name.startswith(SENSORS)]
    print(done.stderr.strip()[-2000:])
    if not done.stdout.strip():
        return 1
    results.write_result(args.out, "load", dict(status=done.returncode, sensors=sensors,
                                                report=json.loads(done.stdout)), METHOD)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
