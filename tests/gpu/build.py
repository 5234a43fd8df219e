#!/usr/bin/env python3
"""Times a full build of the CUDA paths on two cores and lists what each kernel takes; needs no GPU.

usage: build.py [--out DIR] [--cores N]      writes DIR/build.json"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import results

ROOT = pathlib.Path(__file__).resolve().parents[2]
METHOD = ("cmake and ninja -j{cores} of the library attn_kernels_cuda with every architecture of "
          "the default build, on {cores} cores (taskset), without ccache; registers, stack and "
          "spills as ptxas -v states them")
ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


def resource_usage(log):
    """One entry for each kernel and architecture in what ptxas -v printed."""
    kernels, kernel = [], None
    for line in log.splitlines():
        if found := ENTRY.search(line):
            kernel = dict(kernel=found[1], arch=found[2])
        elif kernel is not None and (found := SPILLS.search(line)) and "stack" not in kernel:
            kernel.update(stack=int(found[1]), spill_stores=int(found[2]),
                          spill_loads=int(found[3]))
        elif kernel is not None and (found := USED.search(line)):
            shared = SHARED.search(line)
            kernels.append(dict(kernel, registers=int(found[1]),
                                shared=int(shared[1]) if shared else 0))
            kernel = None
    return demangled(kernels)


def demangled(kernels):
    tool = shutil.which("c++filt")
    if tool and kernels:
        names = subprocess.run([tool], input="\n".join(k["kernel"] for k in kernels), text=True,
                               capture_output=True, check=True).stdout.splitlines()
        for kernel, name in zip(kernels, names):
            kernel["kernel"] = name.removeprefix("void ").split("(attn")[0]
    return sorted(kernels, key=lambda k: (-k["spill_stores"], -k["registers"],
                                             k["kernel"], k["arch"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="results")
    parser.add_argument("--cores", type=int, default=2)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:args.cores]
    environment = {**os.environ, "CCACHE_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        subprocess.run(["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DATTN_BUILD_CUDA=ON",
                        "-DATTN_BUILD_SERVER=OFF", "-DATTN_BUILD_CLIENT=OFF",
                        "-DATTN_BUILD_BENCH=OFF", "-DATTN_BUILD_TESTS=OFF",
                        "-DCMAKE_CUDA_FLAGS=-Xptxas=-v"], check=True,
                       stdout=subprocess.DEVNULL, env=environment)
        done = subprocess.run(["taskset", "-c", ",".join(map(str, cores)), "cmake", "--build",
                               folder, "-j", str(len(cores)), "--target", "attn_kernels_cuda"],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env=environment)
        seconds = time.monotonic() - start
    if done.returncode:
        print(done.stdout[-5000:], file=sys.stderr)
        return 1
    kernels = resource_usage(done.stdout)
    results.write_result(args.out, "build",
                         dict(seconds=round(seconds, 1), cores=len(cores), kernels=kernels),
                         METHOD.format(cores=len(cores)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
