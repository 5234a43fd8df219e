"""Verdicts on flash_sm90."""

import anchors
from exactness_groups import HEAD_DIMS
from report_base import (CUDA, EXACTNESS_PARTS, FLASH_PARTS, SM90, SM90_PARTS, TOOLS, Bad, Verdict,
                         complete_cells, geomean, table)


def yes(met):
    return "met" if met else "not met"


def tflops(cell, name):
    return cell["flops"] / cell["ms"][name] / 1e9 if name in cell["ms"] else None


def shown(value, form):
    return "-" if value is None else format(value, form)


def of_path(result, name):
    if result["path"] != SM90:
        raise Bad(f"{name}: measured of {result['path']}")


# --------------------------------------------------------------------------------- forward

FLOOR, GOAL = (0.90, 0.80), (1.05, 1.0)  # geometric mean of r, least r


def forward(results):
    r = results.read("sm90-forward", SM90_PARTS)
    of_path(r, "sm90-forward")
    # r compares two ratios to cuDNN, which are of one chip and one cuDNN.
    if anchors.DEVICE not in r["gpu"]:
        raise Bad(f"sm90-forward: measured on {r['gpu']}, the anchors on an {anchors.DEVICE}")
    if r["cudnn"] // 100 != anchors.CUDNN_VERSION:
        raise Bad(f"sm90-forward: measured beside cuDNN {r['cudnn']}, the anchors beside "
                  f"{anchors.CUDNN_VERSION}xx")
    rows = {key: row for key, row in anchors.sweep().items() if key[0] == "fwd"}
    cells = {(c["which"], c["head_dim"], c["causal"], c["seqlen"]): c
             for c in complete_cells(r, len(rows), "sm90-forward")}
    if set(cells) != set(rows):
        raise Bad("sm90-forward: the cells are not those of the anchors")
    without = [c["cell"] for c in cells.values() if not {"cudnn", "fa2"} <= set(c["ms"])]
    if without:
        raise Bad(f"sm90-forward: a peer did not run in {without[0]}")
    ratios = {key: anchors.relative(cells[key]["ms"][SM90], cells[key]["ms"]["cudnn"], rows[key])
              for key in rows}
    table(["cell", "ours", "cudnn", "fa2", "cudnn then", "fa3 then", "best then", "r", "kernel"],
          [[cells[key]["cell"],
            *(shown(tflops(cells[key], n), ".1f") for n in (SM90, "cudnn", "fa2")),
            *(f"{row[n]:.1f}" for n in ("cudnn_9_19", "flashattention3", "best_peer")),
            f"{ratios[key]:.3f}", cells[key]["kernel_id"]] for key, row in rows.items()])
    lengths = sorted({key[3] for key in rows})
    table(["r", "causal", *lengths, "mean"],
          [[f"head_dim {dim}", int(causal),
            *(f"{ratios['fwd', dim, causal, n]:.3f}" for n in lengths),
            f"{geomean([ratios['fwd', dim, causal, n] for n in lengths]):.3f}"]
           for dim in sorted({key[1] for key in rows}) for causal in (False, True)])
    mean, least = geomean(ratios.values()), min(ratios.values())
    slowest = cells[min(ratios, key=ratios.get)]["cell"]
    met = {name: mean >= bar[0] and least >= bar[1] for name, bar in
           (("floor", FLOOR), ("goal", GOAL))}
    return Verdict(
        f"r: geometric mean {mean:.3f}, least {least:.3f} ({slowest}), {len(cells)} cells; goal "
        f"{yes(met['goal'])}, floor {yes(met['floor'])}",
        f"floor: geometric mean >= {FLOOR[0]:.2f}, least >= {FLOOR[1]:.2f}; goal: >= "
        f"{GOAL[0]:.2f}, >= {GOAL[1]:.2f}", met["floor"])


# ------------------------------------------------------------------------------- sustained

# Group: the variant that is held to the other, and at least which share of its speed.
SUSTAINED = {"dtype": ("fp16", "bf16", 0.97), "packed": ("packed", "dense", 0.95),
             "grouped": ("grouped", "dense", 0.95)}


def sustained(results):
    name = "sm90-forward-sustained"
    r = results.read(name, SM90_PARTS)
    of_path(r, name)
    cells = {c["cell"]: c for c in complete_cells(r, 2 * len(SUSTAINED), name)}
    rows, least, holds = [], {}, True
    for group, (held, to, bar) in SUSTAINED.items():
        for mask in ("full", "causal"):
            c = cells[f"{group}_{mask}"]
            ratio = c["ms"][to] / c["ms"][held]
            least[group] = min(ratio, least.get(group, ratio))
            holds = holds and ratio >= bar
            rows.append([c["cell"], *(f"{n} {tflops(c, n):.1f}" for n in (held, to)),
                         f"{ratio:.3f}", f"{bar:.2f}", shown(tflops(c, "cudnn"), ".1f")])
    table(["cell", "TFLOP/s", "TFLOP/s", "ratio", "bar", "cudnn"], rows)
    beside, same, cudnn = [], [], []
    for mask, fa3 in anchors.SUSTAINED_TFLOPS.items():
        c = cells[f"dtype_{mask}"]
        ours = tflops(c, "bf16")
        beside.append(f"{mask} {ours:.0f} TFLOP/s ({ours / fa3:.3f} of FlashAttention-3's "
                      f"{fa3:.0f}, cuDNN now {shown(tflops(c, 'cudnn'), '.0f')})")
        for ratios, slow, fast in ((same, "fp16_same_numbers", "bf16"),
                                   (cudnn, "cudnn_fp16", "cudnn")):
            if {slow, fast} <= set(c["ms"]):
                ratios.append(c["ms"][fast] / c["ms"][slow])
    return Verdict(
        f"{', '.join(beside)}, {r['calls']} calls in a row; least fp16 / bf16 "
        f"{least['dtype']:.3f} (on the same numbers {shown(min(same, default=None), '.3f')}; "
        f"cuDNN's {shown(min(cudnn, default=None), '.3f')}), THD / dense {least['packed']:.3f}, "
        f"GQA / dense {least['grouped']:.3f}",
        ">= 0.97, >= 0.95, >= 0.95", holds)


# ---------------------------------------------------------------------------------- decode

DECODE_BAR, REPLAY_GOAL_US = 0.97, 10.0


def decode(results):
    # The path that AUTO chooses: of either kind.
    r = results.read("sm90-decode", (*SM90_PARTS, *FLASH_PARTS))
    then = anchors.decode()
    cells = {(c["batch"], c["keys"]): c for c in complete_cells(r, len(then), "sm90-decode")}
    if set(cells) != set(then):
        raise Bad("sm90-decode: the cells are not those of the anchors")
    rows, ratios, ahead = [], {}, 0
    for key, c in cells.items():
        best, ours = max(then[key].values()), c["gbps"]["ours"]
        ratios[c["cell"]] = min(c["ms"][n] for n in c["ms"] if n != "ours") / c["ms"]["ours"]
        ahead += ours > best
        rows.append([*key, c["path"], *(f"{c['gbps'][n]:.0f}" if n in c["gbps"] else "-" for n in
                                        ("ours", "fa2", "cudnn")), f"{ratios[c['cell']]:.3f}",
                     f"{best:.0f}", f"{ours / best:.3f}", c["kernel_id"]])
    table(["batch", "keys", "path", "GB/s", "fa2", "cudnn", "ours / best", "best then",
           "ours / then", "kernel"], rows)
    declined = sorted({c["declined"] for c in cells.values() if c["declined"]})
    for why in declined:
        print(f"{SM90} declines: {why}")
    slowest = min(ratios, key=ratios.get)
    replay = cells[1, 4096].get("replay_us", {}).get("ours")
    graph = ("no graph replay" if replay is None else
             f"graph replay {replay:.1f} us (goal < {REPLAY_GOAL_US:.0f} "
             f"{yes(replay < REPLAY_GOAL_US)}; FlashAttention-3 {anchors.DECODE_REPLAY_US})")
    paths = sorted({c["path"] for c in cells.values()})
    return Verdict(
        f"least ours / best of cuDNN and FlashAttention-2 {ratios[slowest]:.3f} ({slowest}), "
        f"{len(cells)} cells by {' and '.join(paths)}; above the anchors' best in {ahead} of "
        f"{len(cells)}; batch 1 x 4096: {graph}",
        f">= {DECODE_BAR} in every cell", min(ratios.values()) >= DECODE_BAR)


def few_queries(results):
    name = "sm90-few-queries"
    r = results.read(name, (*SM90_PARTS, *FLASH_PARTS))
    cells = complete_cells(r, 32, name)
    rows, ratios = [], {}
    for c in cells:
        missing = {"ours", "fa2", "cudnn"} - set(c["ms"])
        if missing:
            raise Bad(f"{name}: {', '.join(sorted(missing))} did not run in {c['cell']}")
        ratios[c["cell"]] = min(c["ms"]["fa2"], c["ms"]["cudnn"]) / c["ms"]["ours"]
        rows.append([c["kv_heads"], c["batch"], c["queries"], c["keys"], c["path"],
                     *(f"{c['ms'][n] * 1e3:.1f}" for n in ("ours", "fa2", "cudnn")),
                     f"{ratios[c['cell']]:.3f}", c["kernel_id"]])
    table(["KV heads", "batch", "queries", "keys", "path", "us", "fa2", "cudnn", "ours / best",
           "kernel"], rows)
    slowest = min(ratios, key=ratios.get)
    return Verdict(
        f"ours / best of cuDNN and FlashAttention-2: geometric mean {geomean(ratios.values()):.3f}, "
        f"least {ratios[slowest]:.3f} ({slowest}), {len(cells)} cells",
        f">= {DECODE_BAR} in every cell", ratios[slowest] >= DECODE_BAR)


# ------------------------------------------------------------------------------- exactness

def exactness(results):
    name = "sm90-exactness"
    r, checked = results.read("exactness", EXACTNESS_PARTS), results.read("sanitizers", CUDA)
    ratios = r["ratios"].get(SM90, {})
    if not {"out", "lse"} <= set(ratios):
        raise Bad(f"{name}: out and lse of {SM90} were not compared")
    table(["tensor", "max(error / bound)"], [[t, f"{x:.3f}"] for t, x in ratios.items()])
    groups = {kind: r["groups"][kind].get(SM90, {}) for kind in ("head_dims", "options", "numbers")}
    for kind, counts in groups.items():
        print(f"tensors by {kind}:", ", ".join(f"{key}: {n}" for key, n in counts.items()))
    absent = [dim for dim in HEAD_DIMS if not groups["head_dims"].get(dim)]
    if absent:
        raise Bad(f"{name}: nothing was compared at head_dim {', '.join(absent)}")
    if not groups["numbers"] or not all(groups["numbers"].values()):
        raise Bad(f"{name}: not compared at every magnitude of the numbers")
    runs = [run for run in checked["runs"] if run.get("tensors", {}).get(SM90)]
    table(["tool", "program", "head_dim", "cases", "tensors", "findings", "exit status"],
          [[run["tool"], run["program"], run["head_dim"] or "any", run["cases"],
            run["tensors"][SM90], run["findings"], run["status"]] for run in runs])
    ran = {(run["tool"], run["head_dim"]) for run in runs}
    missing = [f"{tool} at head_dim {dim or 'any'}" for tool in sorted(TOOLS)
               for dim in (*HEAD_DIMS, None) if (tool, dim) not in ran]
    if missing:
        raise Bad(f"{name}: nothing ran on {SM90} under {', '.join(missing)}")
    failed = sum(p["failed"] for p in r["programs"]) + len(r["failed_groups"])
    findings = sum(run["findings"] for run in checked["runs"])
    clean = all(x["status"] == 0 for x in (*r["programs"], *checked["runs"]))
    taken = [option for option, count in groups["options"].items() if count]
    worst = max(ratios.values())
    return Verdict(
        f"max(error / bound) {worst:.3f}, {r['tensors_compared'][SM90]} tensors, "
        f"{sum(1 for n in groups['head_dims'].values() if n)} head dims, {len(taken)} of "
        f"{len(groups['options'])} options, {failed} failed; {findings} findings of {len(TOOLS)} "
        f"sanitizers over {sum(run['tensors'][SM90] for run in runs)} tensors",
        "<= 1, none failed, no findings", worst <= 1 and failed == 0 and findings == 0 and clean)


REPORTS = {"sm90-exactness": exactness, "sm90-forward": forward,
           "sm90-forward-sustained": sustained, "sm90-decode": decode,
           "sm90-few-queries": few_queries}
