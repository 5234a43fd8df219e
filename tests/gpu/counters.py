#!/usr/bin/env python3
"""Hardware counters of the CUDA paths beside the tile model, by Nsight Compute.

usage: counters.py [--out DIR] [--ncu PROGRAM]        writes DIR/counters.json
       counters.py --profiled PLANS.json              what ncu runs: the calls of CASES, in order
Needs torch with CUDA, ATTN_DEVICE_LIBRARY, and permission to read the counters."""

import argparse
import csv
import io
import json
import pathlib
import subprocess
import sys
import tempfile

import torch

import measure
from attn_device import Attention, Library, Refused

FLASH, STANDARD = "flash_sm80", "standard_cuda"
F16, BF16 = torch.float16, torch.bfloat16

# name, path, dtype, batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, options, passes
CASES = (
    ("gpt2", FLASH, F16, 64, 1024, 1024, 16, 16, 64, {}, "fwd bwd"),
    ("gpt2", STANDARD, F16, 64, 1024, 1024, 16, 16, 64, {}, "fwd bwd"),
    ("gpt2_causal", FLASH, F16, 64, 1024, 1024, 16, 16, 64, {"causal": 1}, "fwd bwd"),
    ("gpt2_dropout", FLASH, F16, 64, 1024, 1024, 16, 16, 64,
     {"dropout_p": 0.1, "dropout_seed": 7}, "fwd bwd"),
    ("gpt2_deterministic", FLASH, F16, 64, 1024, 1024, 16, 16, 64, {"deterministic": 1}, "bwd"),
    ("d128_causal_s4096", FLASH, BF16, 2, 4096, 4096, 16, 16, 128, {"causal": 1}, "fwd bwd"),
    ("d128_gqa_s2048", FLASH, BF16, 4, 2048, 2048, 32, 8, 128, {}, "fwd bwd"),
    ("d256_s2048", FLASH, BF16, 4, 2048, 2048, 8, 8, 256, {}, "fwd bwd"),
    ("d128_s2048", STANDARD, BF16, 2, 2048, 2048, 16, 16, 128, {}, "fwd bwd"),
    ("decode_b16_k16384", FLASH, BF16, 16, 1, 16384, 32, 8, 128, {}, "fwd"),
)

# Sectors are 32 bytes. srcunit_tex: between the multiprocessors' L1 and L2.
SECTOR_BYTES = 32
METRICS = {
    "dram_read": "dram__bytes_read.sum",
    "dram_write": "dram__bytes_write.sum",
    "l2_read_sectors": "lts__t_sectors_srcunit_tex_op_read.sum",
    "l2_write_sectors": "lts__t_sectors_srcunit_tex_op_write.sum",
    "l2_red_sectors": "lts__t_sectors_srcunit_tex_op_red.sum",
    "l2_atom_sectors": "lts__t_sectors_srcunit_tex_op_atom.sum",
    "xbar_to_l1_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "l1_to_xbar_bytes": "l1tex__m_l1tex2xbar_write_bytes.sum",
}
MARKER = "FillFunctor"  # of the torch kernel that stands before each call

METHOD = ("ncu, kernel replay, caches flushed before each kernel, clocks left alone; sums over the "
          "kernels of one call. l2_to_sm: sectors between L1 and L2 (read, write, red, atom) x 32 "
          "bytes. DRAM writes that still lie in L2 when a kernel ends are not counted")


def calls(lib):
    """Yields (label, Attention, pass) with everything of the call in place."""
    for name, path, dtype, batch, sq, sk, heads, kv, dim, options, passes in CASES:
        q, k, v, dout = measure.random_tensors(batch, sq, sk, heads, kv, dim, dtype, True)
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


def profiled(plans_path):
    lib = Library()
    marker = torch.empty(32, device="cuda")
    plans = []
    for label, ours, which in calls(lib):
        call = ours.fwd if which == "fwd" else ours.bwd
        ours.forward()
        call.run()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        marker.fill_(1.0)
        call.run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        plans.append({**label, "plan": call.plan})
    pathlib.Path(plans_path).write_text(json.dumps(plans))


def parse(text, plans):
    """Kernels of ncu's CSV, summed for each call."""
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith('"ID"'))
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    units, rows = rows[0], rows[1:]
    groups = []
    for row in rows:
        if MARKER in row["Kernel Name"]:
            groups.append([])
        elif groups:
            groups[-1].append(row)
    if len(groups) != len(plans):
        raise RuntimeError(f"ncu shows {len(groups)} calls, {len(plans)} ran")
    return [summed(plan, group, units) for plan, group in zip(plans, groups)]


SCALE = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "sector": 1, "": 1}


def number(row, units, metric):
    value = row.get(metric, "").replace(",", "")
    if value in ("", "n/a", "nan"):
        return None
    return float(value) * SCALE[units[metric]]


def summed(plan, group, units):
    kernels = []
    for row in group:
        kernel = {name: number(row, units, metric) for name, metric in METRICS.items()}
        kernels.append({"kernel": row["Kernel Name"].split("(")[0][-90:], **kernel})

    def total(*names):
        values = [k[n] for k in kernels for n in names]
        return None if not values or None in values else sum(values)

    read, written = total("l2_read_sectors"), total("l2_write_sectors", "l2_red_sectors",
                                                    "l2_atom_sectors")
    model = plan["plan"]
    result = {**plan, "kernels": kernels, "dram_bytes": total("dram_read", "dram_write")}
    if read is not None and written is not None:
        l2 = SECTOR_BYTES * (read + written)
        result.update(l2_to_sm_read_bytes=SECTOR_BYTES * read,
                      l2_to_sm_write_bytes=SECTOR_BYTES * written, l2_to_sm_bytes=l2,
                      model_over_l2=model["tile_bytes"] / l2,
                      model_loaded_over_l2_read=model["tile_loaded_bytes"] / (SECTOR_BYTES * read),
                      model_stored_over_l2_write=model["tile_stored_bytes"] /
                      (SECTOR_BYTES * written))
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="results")
    parser.add_argument("--ncu", default="ncu")
    parser.add_argument("--profiled")
    args = parser.parse_args()
    if args.profiled:
        profiled(args.profiled)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        plans = pathlib.Path(folder) / "plans.json"
        report = subprocess.run(
            [args.ncu, "--csv", "--page", "raw", "--clock-control", "none", "--profile-from-start",
             "off", "--metrics", ",".join(METRICS.values()), sys.executable, __file__, "--profiled",
             str(plans)], stdout=subprocess.PIPE, text=True, check=False)
        pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
        if report.returncode or not plans.exists():
            print(report.stdout[-3000:], file=sys.stderr)
            return 1
        try:
            cells = parse(report.stdout, json.loads(plans.read_text()))
        except (RuntimeError, KeyError, ValueError, StopIteration):
            (pathlib.Path(args.out) / "counters.csv").write_text(report.stdout)
            raise
    for c in cells:
        ratio = c.get("model_over_l2")
        print(f"{c['case']:20} {c['path']:14} {c['pass']}: L2-SM {c.get('l2_to_sm_bytes', 0) / 1e9:8.3f} GB "
              f"(model {c['plan']['tile_bytes'] / 1e9:8.3f}, ratio {ratio and round(ratio, 3)}; read "
              f"{round(c.get('model_loaded_over_l2_read', 0), 3)}, write "
              f"{round(c.get('model_stored_over_l2_write', 0), 3)}), DRAM "
              f"{(c['dram_bytes'] or 0) / 1e9:8.3f} GB, compulsory "
              f"{c['plan']['compulsory_bytes'] / 1e9:.3f} GB")
    measure.write_result(args.out, "counters", {"cells": cells}, METHOD)
    return 0


if __name__ == "__main__":
    sys.exit(main())
