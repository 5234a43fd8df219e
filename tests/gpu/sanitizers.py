#!/usr/bin/env python3
"""Runs compute-sanitizer over a spread of small cases and writes DIR/sanitizers.json.

usage: sanitizers.py [--out DIR] [--sanitizer PROGRAM] [--tools TOOL...] [--every N]
                     [--time SECONDS] FOLDER
FOLDER holds the exactness programs. Of their cases, every Nth runs, another one for each tool; and
for each tool a few at each head_dim that has a tile of its own, and one with keys that clusters
share."""

import argparse
import collections
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import time

import exactness_groups
import results

METHOD = ("compute-sanitizer over small cases of the exactness programs, another spread of them "
          "for each tool, and a few at each head_dim that has a tile of its own, each case on "
          "every CUDA path that takes it; a shape for each tool of which clusters of flash_sm90 "
          "share the keys; initcheck without poisoned memory, which would count as "
          "initialised, and without cuBLAS, whose kernels store by bulk copies that initcheck does "
          "not see")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Program, cases to choose from. Long and large ones are for the tests that look for wrong numbers.
PROGRAMS = {
    "exactness_matrix_cuda_test": "Option/*:OptionPair/*:HeadDim/*:Random/*",
    "exactness_probe_cuda_test": "Edge/ProbeTest.*_q63:Edge/ProbeTest.*_q65",
}
# Keys that the thread blocks of a cluster copy for each other: a shape for each tool.
LONG_PROGRAM = "exactness_large_cuda_test"
LONG_SHAPES = {"memcheck": "D256WindowPadded", "racecheck": "D192", "initcheck": "D256Causal",
               "synccheck": "D256Causal"}
SUMMARY = re.compile(r"^========= (?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)",
                     re.M)
FINDING = re.compile(r"^========= (Uninit.*|Invalid.*|Error: .*|Warning: .*|Barrier error.*|"
                     r"Program hit.*)\n=========\s+(?:at )?(.*?)(?:\+0x.*)?$", re.M)


def run(sanitizer, tool, folder, program, cases, limit, part=0, parts=1, head_dim=None):
    """A part of a program's cases."""
    environment = {**os.environ, "GTEST_TOTAL_SHARDS": str(parts), "GTEST_SHARD_INDEX": str(part)}
    if tool == "initcheck":
        environment["ATTN_TEST_NO_POISON"] = "1"
        environment["ATTN_CUBLAS"] = "off"
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sanitizer, "--tool", tool, "--error-exitcode", "99", "--print-limit", "8",
             # Host writes to pinned memory, which initcheck does not see, are copied to the device.
             *(["--check-api-memory-access", "no"] if tool == "initcheck" else []),
             (folder / program).resolve(), f"--gtest_filter={cases}"],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=limit)
        status, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        status, text = 124, (error.stdout or b"").decode(errors="replace")
    found = SUMMARY.findall(text)
    kinds = collections.Counter(f"{what.strip()} in {kernel.strip()[:120]}"
                                for what, kernel in FINDING.findall(text))
    finished = text.count("[       OK ]")
    return dict(tool=tool, program=program, head_dim=head_dim, part=part, parts=parts,
                cases=finished,
                # Without a summary the tool did not get to its end.
                findings=sum(int(a or b) for a, b in found) if found else 1,
                status=status, kinds=kinds, summary=bool(found),
                # A case goes through every path that takes it.
                tensors=exactness_groups.compared(text),
                seconds=round(time.monotonic() - start, 1), text=text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="results")
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS)
    parser.add_argument("--every", type=int, default=160)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--time", type=float, default=240)
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        futures = []
        for number, tool in enumerate(TOOLS):
            if tool not in args.tools:
                continue
            # The slow tools first, each on parts of its own.
            for program, cases in PROGRAMS.items():
                parts = args.every if "matrix" in program else max(2, args.every // 8)
                for part in (number, number + len(TOOLS)):
                    futures.append(pool.submit(run, args.sanitizer, tool, args.folder, program,
                                               cases, args.time, part % parts, parts))
            futures.append(pool.submit(run, args.sanitizer, tool, args.folder, LONG_PROGRAM,
                                       f"*LongKeysTest*flash_sm90_{LONG_SHAPES[tool]}", args.time))
            futures += [pool.submit(run, args.sanitizer, tool, args.folder,
                                    exactness_groups.PROGRAM,
                                    exactness_groups.filter_of(head_dim), args.time,
                                    head_dim=head_dim)
                        for head_dim in exactness_groups.HEAD_DIMS]
        rows = [future.result() for future in futures]
    for row in rows:
        text = row.pop("text")
        print(row, flush=True)
        if row["findings"] or row["status"]:
            print(text[:2500], flush=True)
    results.write_result(args.out, "sanitizers", dict(runs=rows), METHOD)
    return 0 if all(r["status"] == 0 and r["findings"] == 0 for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
