#!/usr/bin/env python3
"""Runs the exactness programs of the CUDA paths and writes DIR/exactness.json.

usage: exactness.py [--out DIR] [--jobs N] [--time SECONDS] PROGRAM..."""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import exactness_groups
import results

METHOD = ("each case on every CUDA path over host tensors: forward, backward on its own out and "
          "lse and on those of the other path, held element by element against a float64 "
          "reference; outputs and workspace NaN beforehand, guard bytes around each, NaN in "
          "padding and gaps; groups: tensors compared on each path in the cases of one head_dim, "
          "option or magnitude, by running those alone")
RATIOS = re.compile(r"^max\(error / bound\) of (\S+):((?: \S+ \S+)*)$", re.M)
# Programs of many or long cases are cut into as many parts.
SHARDS = {"exactness_matrix_cuda_test": 32, "exactness_probe_cuda_test": 8,
          "exactness_long_sums_cuda_test": 4, "exactness_known_inputs_cuda_test": 6,
          "exactness_large_cuda_test": 8, "exactness_merge_cuda_test": 4}


def run_shard(program, shard, shards, limit, folder):
    report = pathlib.Path(folder) / f"{program.name}.{shard}.json"
    environment = {**os.environ, "GTEST_TOTAL_SHARDS": str(shards),
                   "GTEST_SHARD_INDEX": str(shard)}
    start = time.monotonic()
    try:
        done = subprocess.run([program.resolve(), "--gtest_brief=1",
                               f"--gtest_output=json:{report}"], env=environment,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace",
                              timeout=limit)
        status, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        status, text = 124, (error.stdout or b"").decode(errors="replace")
    return dict(program=program.name, status=status, text=text,
                seconds=time.monotonic() - start,
                counts=counts_of(json.loads(report.read_text())) if report.exists() else None)


def counts_of(report):
    counts = collections.Counter(passed=0, failed=0, skipped=0)
    for suite in report["testsuites"]:
        for test in suite["testsuite"]:
            if test.get("failures"):
                counts["failed"] += 1
            elif test.get("result") == "SKIPPED":
                counts["skipped"] += 1
            elif test.get("status") == "RUN":
                counts["passed"] += 1
    return counts


def failed_cases(text, limit=10):
    return [line for line in text.splitlines() if line.startswith("[  FAILED  ]")][:limit]


def collect(program, shards):
    """One row: sums over the parts; a part without a report counts as failed."""
    total = collections.Counter(passed=0, failed=0, skipped=0)
    for shard in shards:
        total.update(shard["counts"] or {"failed": 1})
    statuses = [s["status"] for s in shards]
    return dict(program=program, **total, status=max(statuses, key=abs), shards=len(shards),
                seconds=round(sum(s["seconds"] for s in shards), 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="results")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--time", type=float, default=600, help="limit of each part, seconds")
    parser.add_argument("programs", nargs="+", type=pathlib.Path)
    args = parser.parse_args()
    rows, ratios = [], collections.defaultdict(dict)
    compared, failures = collections.Counter(), []
    with tempfile.TemporaryDirectory() as folder, \
            concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        futures = {}
        for program in args.programs:
            count = SHARDS.get(program.name, 1)
            futures[program.name] = [pool.submit(run_shard, program, n, count, args.time, folder)
                                     for n in range(count)]
        for program, parts in futures.items():
            shards = [part.result() for part in parts]
            row = collect(program, shards)
            rows.append(row)
            print(row, flush=True)
            for shard in shards:
                failures += failed_cases(shard["text"])
                if shard["status"] or shard["counts"] is None:
                    print(shard["text"][-3000:], flush=True)
                for path, tensors in RATIOS.findall(shard["text"]):
                    pairs = tensors.split()
                    for tensor, ratio in zip(pairs[::2], map(float, pairs[1::2])):
                        ratios[path][tensor] = max(ratio, ratios[path].get(tensor, 0.0))
                compared.update(exactness_groups.compared(shard["text"]))
    for path, tensors in ratios.items():
        print(f"max(error / bound) of {path}: {tensors}, {compared[path]} tensors", flush=True)
    groups, failed_groups = {}, []
    for program in args.programs:
        if program.name == exactness_groups.PROGRAM:
            groups, failed_groups = exactness_groups.counts(program, args.jobs, args.time)
            print("groups that failed:", failed_groups or "none", flush=True)
    results.write_result(args.out, "exactness",
                         dict(programs=rows, ratios=ratios, tensors_compared=compared,
                              groups=groups, failed_groups=failed_groups, failures=failures),
                         METHOD)
    return 0 if all(r["status"] == 0 for r in rows) and not failed_groups else 1


if __name__ == "__main__":
    sys.exit(main())
