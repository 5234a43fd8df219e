#!/usr/bin/env python3
"""Reads the results of run.sh and says whether a bar holds. See report.sh."""

import argparse
import math
import pathlib
import sys

import report_sm90
from report_base import (CUDA, EXACTNESS_PARTS, FLASH, FLASH_PARTS, OLD_CUDA, PATHS, SERVER, SM90,
                         STANDARD, TOOLS, Bad, Results, Verdict, complete_cells, geomean, table)

# What an exactness run must hold at least.
PROGRAMS = ("exactness_matrix_cuda_test", "exactness_probe_cuda_test", "exactness_merge_cuda_test",
            "exactness_known_inputs_cuda_test", "exactness_large_cuda_test",
            "exactness_long_sums_cuda_test", "exactness_fixture_cuda_test",
            "exactness_select_cuda_test", "host_backend_gpu_test", "ptx_gpu_test")


# ------------------------------------------------------------------------------------ verdicts

def exactness(results):
    r = results.read("exactness", EXACTNESS_PARTS)
    worst, rows = 0.0, []
    for path in PATHS:
        tensors = r.get("ratios", {}).get(path)
        if not tensors:
            raise Bad(f"exactness: nothing was compared on {path}")
        worst = max(worst, *tensors.values())
        rows.append([path, *(f"{tensors.get(t, math.nan):.3f}" for t in
                             ("out", "lse", "dq", "dk", "dv", "dbias", "dsink"))])
    table(["path", "out", "lse", "dq", "dk", "dv", "dbias", "dsink"], rows)
    table(["program", "passed", "failed", "skipped", "exit status"],
          [[p["program"], p["passed"], p["failed"], p["skipped"], p["status"]]
           for p in r["programs"]])
    samples = {s["path"]: s for s in results.read("end-to-end", SERVER)["sample"]}
    missing = [path for path in PATHS if not samples.get(path, {}).get("calls")]
    if missing:
        raise Bad(f"exactness: no call went through gRPC on {', '.join(missing)}")
    table(["by gRPC", "calls", "max(error / bound)", "failed"],
          [[path, s["calls"], f"{s['max_ratio']:.3f}", s["failed"]]
           for path, s in samples.items()])
    failed = sum(row["failed"] for row in (*r["programs"], *samples.values()))
    clean = all(p["status"] == 0 and p["passed"] > 0 for p in r["programs"])
    names = {p["program"] for p in r["programs"]}
    absent = [name for name in PROGRAMS if name not in names]
    if absent:
        raise Bad(f"exactness: {', '.join(absent)} did not run")
    cases = sum(p["passed"] + p["failed"] for p in r["programs"])
    calls = sum(s["calls"] for s in samples.values())
    worst = max(worst, *(s["max_ratio"] for s in samples.values()))
    return Verdict(f"max(error / bound) {worst:.3f}, {cases} cases, {calls} calls by gRPC, "
                   f"{failed} failed", "<= 1, none failed", worst <= 1 and failed == 0 and clean)


def sanitizers(results):
    r = results.read("sanitizers", CUDA)
    rows = [[t["tool"], t["program"], t.get("head_dim") or "any", t["cases"], t["findings"],
             t["status"]] for t in r["runs"]]
    table(["tool", "program", "head_dim", "cases", "findings", "exit status"], rows)
    tools = {t["tool"] for t in r["runs"] if t["cases"] > 0}
    missing = TOOLS - tools
    if missing:
        raise Bad(f"sanitizers: {', '.join(sorted(missing))} did not run")
    findings = sum(t["findings"] for t in r["runs"])
    clean = all(t["status"] == 0 for t in r["runs"])
    return Verdict(f"{findings} findings, {sum(t['cases'] for t in r['runs'])} cases, "
                   f"{len(tools)} tools", "0", findings == 0 and clean)


def sm80_vs_fa2(results):
    r = results.read("sm80-vs-fa2", FLASH_PARTS)
    if r["path"] != FLASH:
        raise Bad(f"sm80-vs-fa2: measured of {r['path']}")
    cells = complete_cells(r, 72, "sm80-vs-fa2")
    ratios = [c["ms"]["fa2"] / c["ms"][FLASH] for c in cells]
    rows = []
    for which in ("fwd", "bwd"):
        for dim in (64, 128, 256):
            for causal in (False, True):
                some = [(c["seqlen"], x) for c, x in zip(cells, ratios)
                        if (c["which"], c["head_dim"], c["causal"]) == (which, dim, causal)]
                rows.append([which, dim, int(causal), *(f"{x:.2f}" for _, x in sorted(some))])
    table(["ours / fa2", "head_dim", "causal", 512, 1024, 2048, 4096, 8192, 16384], rows)
    mean, least = geomean(ratios), min(ratios)
    cudnn = [c["ms"]["cudnn"] / c["ms"][FLASH] for c in cells if "cudnn" in c["ms"]]
    if cudnn:
        print(f"against cuDNN: geometric mean {geomean(cudnn):.3f} of {len(cudnn)} cells")
    slow = cells[ratios.index(least)]["cell"]
    return Verdict(f"geometric mean {mean:.3f}, least {least:.3f} ({slow}), {len(cells)} cells",
                   "geometric mean >= 0.9, least >= 0.75", mean >= 0.9 and least >= 0.75)


def gpt2_medium(results):
    r = results.read("gpt2-medium", OLD_CUDA)
    counters = results.read("counters", OLD_CUDA)
    rows = []
    for case in r["cases"]:
        for name, run in case["runs"].items():
            rows.append([int(case["causal"]), case["dropout_p"], name,
                         *(f"{run[k]:.3f}" if k in run else "-" for k in
                           ("fwd_ms", "bwd_ms", "ms", "model_budget_ms")), run.get("error", "")])
    table(["causal", "dropout", "run", "fwd ms", "bwd ms", "both ms", "model ms", ""], rows)

    names = (FLASH, STANDARD, "fa2")
    plain, dropped = ({name: c["runs"].get(name, {}).get("ms") for name in names} |
                      {"budget": c["runs"][STANDARD].get("model_budget_ms")}
                      for c in (case_of(r, 0.0), case_of(r, 0.1)))
    for case in (plain, dropped):
        if None in case.values():
            raise Bad("gpt2-medium: a run failed")
    standard = max(c[STANDARD] / c["budget"] for c in (plain, dropped))
    flash = max(c[FLASH] / c["fa2"] for c in (plain, dropped))
    measured = {(c["path"], c["pass"]): c for c in counters["cells"] if c["case"] == "gpt2"}
    wanted = [((path, which), name) for which in ("fwd", "bwd") for path, name in
              ((FLASH, "l2_to_sm_bytes"), (FLASH, "dram_bytes"), (STANDARD, "dram_bytes"))]
    missing = [key for key, name in wanted if measured.get(key, {}).get(name) is None]
    if missing:
        raise Bad(f"gpt2-medium: counters of {missing[0]} are missing")
    rows = [[c["case"], c["path"], c["pass"],
             *(f"{c[k] / 1e9:.3f}" if c.get(k) else "-" for k in ("l2_to_sm_bytes", "dram_bytes")),
             f"{c['plan']['tile_bytes'] / 1e9:.3f}", f"{c['plan']['compulsory_bytes'] / 1e9:.3f}",
             f"{c['plan']['tile_bytes'] / c['l2_to_sm_bytes']:.3f}" if c.get("l2_to_sm_bytes")
             else "-"] for c in counters["cells"]]
    table(["case", "path", "pass", "L2-SM GB", "DRAM GB", "model GB", "compulsory GB",
           "model / L2"], rows)
    off = max(abs(measured[FLASH, which]["plan"]["tile_bytes"] /
                  measured[FLASH, which]["l2_to_sm_bytes"] - 1) for which in ("fwd", "bwd"))
    dram = {path: sum(measured[path, w]["dram_bytes"] for w in ("fwd", "bwd"))
            for path in (FLASH, STANDARD)}
    return Verdict(
        f"standard {standard:.2f} of its model's time, flash {flash:.2f} of fa2's time, tile model "
        f"off the L2 counters by {100 * off:.1f}%, DRAM {dram[STANDARD] / 1e9:.1f} : "
        f"{dram[FLASH] / 1e9:.1f} GB (paper 40.3 : 4.4)",
        "<= 1.5, <= 1.1, <= 10%", standard <= 1.5 and flash <= 1.1 and off <= 0.10)


def case_of(r, dropout):
    found = [c for c in r["cases"] if not c["causal"] and c["dropout_p"] == dropout]
    if not found:
        raise Bad(f"gpt2-medium: no run with dropout {dropout}")
    return found[0]


def decode(results):
    r = results.read("decode", FLASH_PARTS)
    cells = complete_cells(r, 9, "decode")
    path = r["path"]
    table(["batch", "keys", "GB/s", "fa2", "cudnn", "ours / fa2"],
          [[c["batch"], c["keys"], *(f"{c['gbps'][n]:.0f}" if n in c["gbps"] else "-"
                                     for n in (path, "fa2", "cudnn")),
            f"{c['ms']['fa2'] / c['ms'][path]:.3f}"] for c in cells])
    least = min(c["ms"]["fa2"] / c["ms"][path] for c in cells)
    return Verdict(f"least ours / fa2 {least:.3f}, {len(cells)} cells", ">= 1.0 in every cell",
                   least >= 1.0)


def block_sparse(results):
    r = results.read("block-sparse", FLASH_PARTS)
    cells = complete_cells(r, 5, "block-sparse")
    values = [c["ms"][w] / (c["density"] * r["dense_ms"][w]) for c in cells for w in ("fwd", "bwd")]
    table(["density", "fwd ms", "bwd ms", "fwd / (density dense)", "bwd / (density dense)"],
          [[f"{c['density']:.4f}", f"{c['ms']['fwd']:.3f}", f"{c['ms']['bwd']:.3f}",
            *(f"{c['ms'][w] / (c['density'] * r['dense_ms'][w]):.3f}" for w in ("fwd", "bwd"))]
           for c in cells])
    return Verdict(f"worst time / (density x dense time) {max(values):.3f}, {len(cells)} "
                   f"densities, {r['shape']['seqlen']} tokens", "<= 1.3", max(values) <= 1.3)


def gpu_memory(results):
    r = results.read("gpu-memory", FLASH_PARTS)
    worst, longest, rows = 0.0, 0, []
    for series in r["series"]:
        points = series["points"]
        for point in points:
            standard = point["standard"]
            rows.append([series["head_dim"], point["seqlen"],
                         f"{point['flash']['device_bytes'] / 2**20:.0f}",
                         f"{standard['device_bytes'] / 2**20:.0f}" if "device_bytes" in standard
                         else "refused", f"{point['standard_unchunked_bytes'] / 2**20:.0f}"])
        longest = max(longest, points[-1]["seqlen"])
        worst = max(worst, *(b["flash"]["device_bytes"] / a["flash"]["device_bytes"]
                             for a, b in zip(points, points[1:])))
    table(["head_dim", "seqlen", "flash MiB", "standard MiB", "standard, all heads at once"], rows)
    if longest < 65536:
        raise Bad(f"gpu-memory: measured up to {longest} tokens only")
    return Verdict(f"largest peak(2S) / peak(S) {worst:.3f}, up to {longest} tokens", "<= 2.2",
                   worst <= 2.2)


def end_to_end(results):
    r = results.read("end-to-end", (*SERVER, "client"))
    table(["fixture", "exit status"], [[f["command"], f["status"]] for f in r["fixture"]])
    rows = [[c["call"], c["path"], c["device_kind"],
             *(f"{c['share'].get(s, 0):.3f}" for s in r["stages"]), f"{c['total_ms']:.3f}"]
            for c in r["calls"]]
    table(["call", "path", "device", *r["stages"], "total ms"], rows)
    wanted = {"forward", "backward"}
    on_gpu = {c["call"].split()[0] for c in r["calls"]
              if c["ok"] and c["device_kind"] == "CUDA" and c["path"] in PATHS}
    failed = [c["call"] for c in r["calls"] if not c["ok"]]
    failed += [f["command"] for f in r["fixture"] if f["status"] != 0]
    if {f["command"] for f in r["fixture"]} != wanted:
        raise Bad("end-to-end: the fixture did not run")
    counted = {(e["pass"], e["path"]): 0 for e in r["executions"]}
    for e in r["executions"]:
        counted[e["pass"], e["path"]] += e["calls"]
    table(["pass", "path", "calls by the metrics"], [[*key, int(n)] for key, n in counted.items()])
    if r["isa"][:1] == ["sm_90"] and not counted.get(("forward", SM90)):
        failed.append(f"the metrics count no forward on {SM90}")
    for what in failed:
        print("failed:", what)
    return Verdict(f"{len(r['calls'])} calls and the fixture, {len(failed)} failed, on the GPU: "
                   f"{' and '.join(sorted(on_gpu)) or 'none'}",
                   "forward and backward on the GPU, each by the fastest path, none failed",
                   wanted <= on_gpu and not failed)


MIN_RANDOM_CALLS = 200  # of each path that the device has


def random_calls(results):
    r = results.read("random-calls", CUDA)
    table(["path", "held against", "calls", "kernels", "largest difference / tolerance"],
          [[path, r["pairs"][path], c["calls"], len(c["kernels"]), f"{c['worst']:.3f}"]
           for path, c in r["paths"].items()])
    wanted = [FLASH, *([SM90] if r["capability"] == [9, 0] else [])]
    few = [path for path in wanted if r["paths"][path]["calls"] < MIN_RANDOM_CALLS]
    if few:
        raise Bad(f"random-calls: {r['paths'][few[0]]['calls']} calls on {few[0]}, fewer than "
                  f"{MIN_RANDOM_CALLS}")
    for failure in r["failures"]:
        print("failed:", failure)
    calls = sum(r["paths"][path]["calls"] for path in wanted)
    return Verdict(f"{calls} calls by {len(wanted)} paths, each {r['times']} times, "
                   f"{len(r['failures'])} failed", "bitwise the same, as the next path, none failed",
                   not r["failures"])


def build(results):
    r = results.read("build", CUDA)
    rows = [[*(k[n] for n in ("registers", "stack", "spill_stores", "spill_loads", "shared")),
             k["arch"], k["kernel"][:90]] for k in r["kernels"]]
    table(["registers", "stack B", "spill stores B", "spill loads B", "shared B", "arch",
           "kernel"], rows)
    if not r["kernels"]:
        raise Bad("build: no kernel in the table")
    spills = sum(1 for k in r["kernels"] if k["spill_stores"] or k["spill_loads"])
    minutes = r["seconds"] / 60
    return Verdict(f"{minutes:.1f} minutes on {r['cores']} cores, {len(r['kernels'])} kernels, "
                   f"{spills} of them spill", "<= 30 minutes on 2 cores",
                   minutes <= 30 and r["cores"] <= 2)


REPORTS = {"exactness": exactness, "sanitizers": sanitizers, "sm80-vs-fa2": sm80_vs_fa2,
           "gpt2-medium": gpt2_medium, "decode": decode, "block-sparse": block_sparse,
           "gpu-memory": gpu_memory, "end-to-end": end_to_end, "random-calls": random_calls,
           "build": build, **report_sm90.REPORTS}


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="report.sh")
    parser.add_argument("name", choices=REPORTS)
    parser.add_argument("--results", default=pathlib.Path(__file__).parent / "results")
    parser.add_argument("--any-sources", action="store_true",
                        help="also for results of an older state of the code")
    args = parser.parse_args(arguments)
    try:
        verdict = REPORTS[args.name](Results(args.results, args.any_sources))
    except Bad as error:
        print(f"{args.name}: no verdict: {error}")
        return 1
    except (KeyError, TypeError, IndexError, ZeroDivisionError) as error:
        print(f"{args.name}: no verdict: a result lacks or misstates {error!r}")
        return 1
    print("the bar holds" if verdict.holds else "the bar does NOT hold")
    print(f"{args.name}: {verdict.value} (bar: {verdict.bar})")
    return 0 if verdict.holds else 1


if __name__ == "__main__":
    sys.exit(main())
