#!/usr/bin/env python3
"""Hardware counters of the CUDA paths beside the tile model, by Nsight Compute.

usage: counters.py [--out DIR] [--result NAME] [--ncu PROGRAM] [--time SECONDS] [GROUP...]
writes DIR/NAME.json, by default counters.json, which holds the groups but sm90;
       counters.py --profiled PLANS.json GROUP
is what ncu runs: the calls of a group, in order.
Needs torch with CUDA, ATTN_DEVICE_LIBRARY, and permission to read the counters."""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import torch

import measure
import results
from counters_parse import METRICS, merge, parse, summed
from attn_device import Attention, Library, Refused

SM90, FLASH, STANDARD = "flash_sm90", "flash_sm80", "standard_cuda"
F16, BF16 = torch.float16, torch.bfloat16

# name, path, dtype, batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, options, passes
GROUPS = {
    "gpt2-flash": (
        ("gpt2", FLASH, F16, 64, 1024, 1024, 16, 16, 64, {}, "fwd bwd"),
        ("gpt2_causal", FLASH, F16, 64, 1024, 1024, 16, 16, 64, {"causal": 1}, "fwd bwd"),
    ),
    "gpt2-standard": (
        ("gpt2", STANDARD, F16, 64, 1024, 1024, 16, 16, 64, {}, "fwd bwd"),
    ),
    "others": (
        ("gpt2_deterministic", FLASH, F16, 64, 1024, 1024, 16, 16, 64, {"deterministic": 1}, "bwd"),
        ("d128_causal_s4096", FLASH, BF16, 2, 4096, 4096, 16, 16, 128, {"causal": 1}, "fwd bwd"),
        ("d128_gqa_s2048", FLASH, BF16, 4, 2048, 2048, 32, 8, 128, {}, "fwd bwd"),
        ("d256_s2048", FLASH, BF16, 4, 2048, 2048, 8, 8, 256, {}, "fwd bwd"),
        ("decode_b16_k16384", FLASH, BF16, 16, 1, 16384, 32, 8, 128, {}, "fwd"),
        ("d128_s2048", STANDARD, BF16, 2, 2048, 2048, 16, 16, 128, {}, "fwd bwd"),
    ),
    # A result of its own: it goes stale with the kernels of sm90, the others with theirs.
    "sm90": (
        ("d128_s4096", SM90, BF16, 4, 4096, 4096, 16, 16, 128, {}, "fwd"),
        ("d128_causal_s4096", SM90, BF16, 4, 4096, 4096, 16, 16, 128, {"causal": 1}, "fwd"),
        ("d256_causal_s2048", SM90, BF16, 8, 2048, 2048, 8, 8, 256, {"causal": 1}, "fwd"),
        ("d256_causal_s8192", SM90, BF16, 2, 8192, 8192, 8, 8, 256, {"causal": 1}, "fwd"),
    ),
}

METHOD = ("ncu, kernel replay, caches flushed before each kernel, clocks left alone; sums over the "
          "kernels of one call. l2_to_sm: bytes from the crossbar into L1 and from L1 into the "
          "crossbar, which is what the multiprocessors ask of L2. l2_slices: sectors at the slices "
          "x 32 bytes; fewer for reads, because chips of 9.0 serve equal requests of neighbouring "
          "multiprocessors once. DRAM writes that still lie in L2 when a kernel ends are not "
          "counted")


def calls(lib, group):
    """Yields (label, Attention, pass) with everything of the call in place."""
    for name, path, dtype, batch, sq, sk, heads, kv, dim, options, passes in GROUPS[group]:
        q, k, v, dout = measure.random_tensors(batch, sq, sk, heads, kv, dim, dtype,
                                               "bwd" in passes)
        label = dict(case=name, path=path, dtype=str(dtype).removeprefix("torch."), batch=batch,
                     seqlen_q=sq, seqlen_k=sk, heads=heads, kv_heads=kv, head_dim=dim,
                     options=options)
        try:
            ours = Attention(lib, path, q, k, v, dout, **options)
        except Refused as error:
            print(f"{name} {path}: {error}", file=sys.stderr)
            continue
        for which in passes.split():
            yield {**label, "pass": which}, ours, which


def profiled(plans_path, group):
    lib = Library()
    marker = torch.empty(32, device="cuda")
    plans = []
    for label, ours, which in calls(lib, group):
        call = ours.fwd if which == "fwd" else ours.bwd
        ours.forward()
        call.run()
        torch.cuda.synchronize()
        begin = time.monotonic()
        torch.cuda.profiler.start()
        marker.fill_(1.0)
        call.run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        print(f"{label['case']} {label['path']} {which}: {time.monotonic() - begin:.1f} s under "
              "ncu", file=sys.stderr, flush=True)
        plans.append({**label, "plan": call.plan})
    pathlib.Path(plans_path).write_text(json.dumps(plans))


ALL = tuple(METRICS)
# Metrics that one pass takes are taken without saving and restoring what the kernels write, which
# for the scores of the standard algorithm takes minutes: there, DRAM only.
SETS = {"gpt2-standard": (ALL[:2],)}


def measured(ncu, group, limit, out):
    """The calls of a group, under ncu. Raises RuntimeError."""
    runs = [run_ncu(ncu, group, names, limit, out) for names in SETS.get(group, (ALL,))]
    plans = runs[0][0]
    return [summed(plan, kernels)
            for plan, kernels in zip(plans, merge([kernels for _, kernels in runs]))]


def run_ncu(ncu, group, names, limit, out):
    """(plans, kernels of each call)."""
    with tempfile.TemporaryDirectory() as folder:
        plans, table = pathlib.Path(folder) / "plans.json", pathlib.Path(folder) / "table.csv"
        command = [ncu, "--csv", "--page", "raw", "--clock-control", "none", "--profile-from-start",
                   "off", "--log-file", str(table), "--metrics",
                   ",".join(METRICS[name] for name in names), sys.executable, __file__,
                   "--profiled", str(plans), group]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{group}: not within {limit} s") from None
        text = table.read_text() if table.exists() else ""
        if done.returncode or not plans.exists():
            raise RuntimeError(f"{group}: exit status {done.returncode}: {text[-1500:]}")
        described = json.loads(plans.read_text())
        try:
            return described, parse(text, len(described))
        except (RuntimeError, KeyError, ValueError, StopIteration) as error:
            (pathlib.Path(out) / f"counters-{group}.csv").write_text(text)
            raise RuntimeError(f"{group}: {error!r}; see counters-{group}.csv") from error


def show(c):
    def rounded(name):
        return round(c.get(name) or 0, 3)
    print(f"{c['case']:20} {c['path']:14} {c['pass']}: L2-SM "
          f"{(c.get('l2_to_sm_bytes') or 0) / 1e9:8.3f} GB, model / L2 {rounded('model_over_l2')} "
          f"(read {rounded('model_loaded_over_l2_read')}, write "
          f"{rounded('model_stored_over_l2_write')}), DRAM {(c['dram_bytes'] or 0) / 1e9:8.3f} GB, "
          f"compulsory {c['plan']['compulsory_bytes'] / 1e9:.3f} GB", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="results")
    parser.add_argument("--result", default="counters")
    parser.add_argument("--ncu", default="ncu")
    parser.add_argument("--time", type=float, default=300, help="limit of each group, seconds")
    parser.add_argument("--profiled")
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []])
    args = parser.parse_args()
    if args.profiled:
        profiled(args.profiled, args.groups[0])
        return 0
    pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
    cells, failed = [], []
    for group in args.groups or [name for name in GROUPS if name != "sm90"]:
        try:
            cells += measured(args.ncu, group, args.time, args.out)
        except RuntimeError as error:
            failed.append(str(error))
            print(error, file=sys.stderr, flush=True)
    for cell in cells:
        show(cell)
    results.write_result(args.out, args.result, {"cells": cells, "failed": failed}, METHOD)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
