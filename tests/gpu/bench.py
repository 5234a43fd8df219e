#!/usr/bin/env python3
"""Times the CUDA paths beside cuDNN and FlashAttention-2 in one process, and writes JSON.

usage: bench.py [--out DIR] [--pause SECONDS] [--path NAME] [--cells PATTERN...] BENCH...
BENCH: sweep decode gpt2 block-sparse memory deterministic random sm90-forward sm90-sustained
sm90-decode sm90-few-queries, or all. PATTERN: shell pattern over cell names such as
bwd_d128_causal_s4096 (sweep, sm90-forward), dtype_full (sm90-sustained), b16_k16384 (decode,
sm90-decode) or b16_q64_k4096 (sm90-few-queries).
Needs torch with CUDA, and ATTN_DEVICE_LIBRARY (libattn_device.so)."""

import argparse
import os
import sys
import traceback

import torch

import bench_cases
import bench_random
import bench_sm90
import bench_sweep
import measure
import results
from attn_device import Library

# Name on the command line: function, name of its result.
BENCHES = {
    "sweep": (bench_sweep.sweep, "sm80-vs-fa2"),
    "decode": (bench_sweep.decode, "decode"),
    "gpt2": (bench_cases.gpt2, "gpt2-medium"),
    "block-sparse": (bench_cases.block_sparse, "block-sparse"),
    "memory": (bench_cases.memory, "gpu-memory"),
    "deterministic": (bench_cases.deterministic, "deterministic"),
    "random": (bench_random.random_calls, "random-calls"),
    "sm90-forward": (bench_sm90.forward, "sm90-forward"),
    "sm90-sustained": (bench_sm90.sustained, "sm90-forward-sustained"),
    "sm90-decode": (bench_sm90.decode, "sm90-decode"),
    "sm90-few-queries": (bench_sm90.few_queries, "sm90-few-queries"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="results")
    parser.add_argument("--pause", type=float,
                        help="seconds; default: 0.1, and for sm90-forward that of the anchors, 0.5")
    parser.add_argument("--path", help="the path of sweep, decode (default: flash_sm80), "
                        "sm90-forward and sm90-sustained (default: flash_sm90)")
    parser.add_argument("--cells", nargs="*", default=[])
    parser.add_argument("--bench", "--only", nargs="*", default=[])
    parser.add_argument("benches", nargs="*", metavar="BENCH")
    args = parser.parse_args()
    names = args.benches + args.bench or ["sweep", "decode"]
    if names == ["all"]:
        names = list(BENCHES)
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        parser.error(f"unknown bench {unknown[0]}; benches: {' '.join(BENCHES)}")
    torch.manual_seed(0)
    lib = Library(os.environ.get("ATTN_DEVICE_LIBRARY"))
    timer = measure.Timer(pause=0.1 if args.pause is None else args.pause)
    failed = 0
    for name in names:
        run, result_name = BENCHES[name]
        print(f"----- {name}", flush=True)
        try:
            result = run(lib, timer, args)
        except Exception:  # the next one may still answer
            traceback.print_exc()
            failed += 1
            continue
        results.write_result(args.out, result_name, result, timer.method())
        torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
