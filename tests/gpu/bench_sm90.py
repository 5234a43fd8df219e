"""flash_sm90 forward beside cuDNN and FlashAttention-2: the sweep, back-to-back calls, decode."""

import torch

import anchors
import bench_sweep
import measure
from attn_device import Attention, Refused
from bench_sweep import DIM, HEADS, KV_HEADS

SM90, SM80 = "flash_sm90", "flash_sm80"
# The pause of the anchors' bursts: shorter ones leave the chip warmer.
PAUSE_S = 0.5


# --------------------------------------------------------------------------------- forward

def forward(lib, timer, args):
    """The forward cells of the sweep; r of each as anchors.py says."""
    path, rows, cells = args.path or SM90, anchors.sweep(), []
    timer = measure.Timer(pause=PAUSE_S if args.pause is None else args.pause)
    print(f"{'cell':24} {path:>10} {'cudnn':>7} {'fa2':>7} TFLOP/s  {'r':>6}  kernel")
    for name, which, dim, causal, seqlen in bench_sweep.sweep_cells():
        if which != "fwd" or not measure.selected(name, args.cells):
            continue
        cell = dict(cell=name, which=which, head_dim=dim, causal=causal, seqlen=seqlen)
        with measure.errors_noted(cell, 24):
            cell.update(bench_sweep.sweep_cell(lib, timer, path, which, dim, causal, seqlen))
            t, ms = cell["tflops"], cell["ms"]
            if "cudnn" in ms:
                cell["r"] = anchors.relative(ms[path], ms["cudnn"],
                                             rows[which, dim, causal, seqlen])
            print(f"{name:24} {t[path]:10.1f} {bench_sweep.text(t.get('cudnn'), '7.1f')} "
                  f"{bench_sweep.text(t.get('fa2'), '7.1f')}          "
                  f"{bench_sweep.text(cell.get('r'), '6.3f')}  {cell['kernel_id']}", flush=True)
        cells.append(cell)
    rs = [c["r"] for c in cells if "r" in c]
    if rs:
        print(f"r: geometric mean {measure.geomean(rs):.3f}, least {min(rs):.3f}, {len(rs)} cells")
    return dict(path=path, complete=not args.cells, cells=cells, method=timer.method())


# ------------------------------------------------------------------------------- sustained

CALLS, ROUNDS = 300, 2
SUSTAINED_METHOD = (
    f"{CALLS} calls back to back between two CUDA events, L2 not cleared; the variants of a cell "
    f"one after another in {ROUNDS} rounds, every second one in reverse order, so that a drift of "
    "the clocks cancels, after a round that is not timed; a variant's time is its mean over the "
    "rounds")


def in_a_row(run, calls):
    """Milliseconds of one of `calls` calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


def interleaved(variants, calls=CALLS, rounds=ROUNDS):
    """{name: milliseconds of a call in each round} of {name: callable}."""
    for run in variants.values():
        in_a_row(run, max(1, calls // 3))
    times = {name: [] for name in variants}
    for number in range(rounds):
        for name in list(variants) if number % 2 == 0 else reversed(list(variants)):
            times[name].append(in_a_row(variants[name], calls))
    return times


class Variant:
    """One side of a comparison: ours on some tensors, checked against FlashAttention-2. `like`: a
    variant whose numbers this one has, in its own type."""

    def __init__(self, lib, path, batch, seqlen, heads, kv_heads, dtype, causal, packed=False,
                 like=None):
        if like is None:
            q, k, v, _ = measure.random_tensors(batch, seqlen, seqlen, heads, kv_heads, 128, dtype,
                                                False)
        else:
            q, k, v = (t.to(dtype) for t in like.tensors)
        self.tensors = q, k, v
        self.peers = measure.heads_first(q, k, v)
        self.flops = 4 * batch * seqlen**2 * heads * 128 * (0.5 if causal else 1)
        self.causal = causal
        options = {}
        if packed:
            # Equal lengths: the same work as without packing, for any difference to show.
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            lengths = [n * seqlen for n in range(batch + 1)]
            options = dict(cu_seqlens_q=lengths, cu_seqlens_k=lengths)
        self.ours = Attention(lib, path, q, k, v, causal=causal, **options)
        self.ours.forward()
        out = self.ours.out.view(batch, seqlen, heads, 128).transpose(1, 2)
        want = measure.grouped_forward("fa2", *self.peers, causal=causal)()
        measure.verify("sustained", [("out", out, want)])

    def cudnn(self):
        peer = measure.Cudnn(*self.peers, self.causal)
        peer.lse = False  # as in the anchors
        return peer.forward


def dtype_variants(lib, path, causal):
    bf16 = Variant(lib, path, 1, 16384, 16, 16, torch.bfloat16, causal)
    fp16 = Variant(lib, path, 1, 16384, 16, 16, torch.float16, causal)
    # bf16's three bits fewer switch less, and power limits: the same numbers, which fp16 holds too,
    # tell what the kernel costs from what the data costs.
    same = Variant(lib, path, 1, 16384, 16, 16, torch.float16, causal, like=bf16)
    return ({"bf16": bf16, "fp16": fp16, "fp16_same_numbers": same},
            {"cudnn": bf16.cudnn(), "cudnn_fp16": fp16.cudnn()})


def packed_variants(lib, path, causal):
    return {"dense": Variant(lib, path, 4, 4096, 16, 16, torch.bfloat16, causal),
            "packed": Variant(lib, path, 4, 4096, 16, 16, torch.bfloat16, causal, True)}, {}


def grouped_variants(lib, path, causal):
    return {"dense": Variant(lib, path, 1, 16384, 32, 32, torch.bfloat16, causal),
            "grouped": Variant(lib, path, 1, 16384, 32, 8, torch.bfloat16, causal)}, {}


GROUPS = {"dtype": dtype_variants, "packed": packed_variants, "grouped": grouped_variants}


def sustained(lib, timer, args):
    path, cells = args.path or SM90, []
    for group, make in GROUPS.items():
        for causal in (False, True):
            name = f"{group}_{'causal' if causal else 'full'}"
            if not measure.selected(name, args.cells):
                continue
            cell = dict(cell=name, group=group, causal=causal)
            with measure.errors_noted(cell):
                cell.update(sustained_cell(*make(lib, path, causal)))
                print(name, cell["tflops"], "TFLOP/s, rounds in ms", cell["rounds_ms"], flush=True)
            torch.cuda.empty_cache()
            cells.append(cell)
    return dict(path=path, calls=CALLS, rounds=ROUNDS, complete=not args.cells, cells=cells,
                method=SUSTAINED_METHOD)


def sustained_cell(ours, peers):
    """`ours`: variants, all of the same work. `peers`: callables that do it too."""
    runs, errors = {name: v.ours.forward for name, v in ours.items()}, {}
    for name, run in peers.items():
        try:
            run()
            runs[name] = run
        except RuntimeError as error:
            errors[name] = measure.first_line(error)
    times = interleaved(runs)
    flops, = {v.flops for v in ours.values()}
    mean = {name: sum(ms) / len(ms) for name, ms in times.items()}
    return dict(flops=flops, rounds_ms={n: [round(x, 5) for x in ms] for n, ms in times.items()},
                ms={name: round(ms, 5) for name, ms in mean.items()},
                tflops={name: round(flops / ms / 1e9, 1) for name, ms in mean.items()},
                kernel_ids={name: v.ours.fwd.plan["kernel_id"] for name, v in ours.items()},
                errors=errors)


# ---------------------------------------------------------------- decode, and a few queries

REPLAYED_CELL = "b1_k4096"
REPLAYS, UNROLLED = 200, 50
DECODE_METHOD = (
    "each call launched and replayed as a CUDA graph, both by bursts, and the shorter of the two "
    "for ours and for each peer, so that the host's part counts for nobody; replay: a graph of one "
    f"call, {REPLAYS} times in a row, median of 5, L2 not cleared; unrolled: the same of a graph "
    f"of {UNROLLED} calls; ")


def chosen(lib, q, k, v):
    """(path, call, why flash_sm90 declined) as the policy AUTO chooses: the fastest that takes the
    call."""
    try:
        return SM90, Attention(lib, SM90, q, k, v), None
    except Refused as error:
        return SM80, Attention(lib, SM80, q, k, v), measure.first_line(error)


def captured(run, calls=1):
    """A CUDA graph of `calls` calls. Raises RuntimeError where the call cannot be captured."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph


def replay_us(graph, calls):
    """Microseconds of one of the `calls` calls of a graph, replayed in a row."""
    count = max(1, REPLAYS // calls)
    in_a_row(graph.replay, count)
    times = sorted(in_a_row(graph.replay, count) for _ in range(5))
    return times[2] / calls * 1e3


def few_queries_cells():
    """(name, KV heads, batch, queries, keys): chunks of prompts, drafts to verify."""
    for batch, keys in ((1, 4096), (1, 65536), (16, 4096), (16, 16384)):
        for queries in (17, 32, 64, 128, 256, 512):
            yield f"b{batch}_q{queries}_k{keys}", KV_HEADS, batch, queries, keys
    # No head shares its keys: memory limits.
    for batch, keys in ((1, 65536), (16, 8192)):
        for queries in (17, 32, 64, 128):
            yield f"mha_b{batch}_q{queries}_k{keys}", HEADS, batch, queries, keys


def decode(lib, timer, args):
    return beside_peers(lib, timer, args, (
        (name, KV_HEADS, batch, 1, keys) for name, batch, keys in bench_sweep.decode_cells()))


def few_queries(lib, timer, args):
    return beside_peers(lib, timer, args, few_queries_cells())


def beside_peers(lib, timer, args, wanted):
    """Cells of 32 query heads beside both peers, launched and as graphs."""
    cells = []
    print(f"{'cell':18} {'path':>10} {'ours':>8} {'fa2':>8} {'cudnn':>8} GB/s  {'/best':>6}")
    for name, kv_heads, batch, queries, keys in wanted:
        if not measure.selected(name, args.cells):
            continue
        cell = dict(cell=name, kv_heads=kv_heads, batch=batch, queries=queries, keys=keys, ms={},
                    gbps={}, modes={})
        with measure.errors_noted(cell, 18):
            decode_cell(lib, timer, cell, replay=name == REPLAYED_CELL)
            g = cell["gbps"]
            print(f"{name:18} {cell['path']:>10} {g['ours']:8.0f} "
                  f"{bench_sweep.text(g.get('fa2'), '8.0f')} "
                  f"{bench_sweep.text(g.get('cudnn'), '8.0f')}       "
                  f"{cell['ratio_best']:6.3f}  {cell['kernel_id']} "
                  f"{cell.get('replay_us', '')}", flush=True)
        torch.cuda.empty_cache()
        cells.append(cell)
    return dict(heads=HEADS, head_dim=DIM, complete=not args.cells, cells=cells,
                method=DECODE_METHOD + timer.method())


def decode_cell(lib, timer, cell, replay):
    q, k, v, _ = measure.random_tensors(cell["batch"], cell["queries"], cell["keys"], HEADS,
                                        cell["kv_heads"], DIM, torch.bfloat16, False)
    kv_bytes = 2 * k.numel() * k.element_size()
    hq, hk, hv = measure.heads_first(q, k, v)
    cell["path"], ours, cell["declined"] = chosen(lib, q, k, v)
    cell["kernel_id"] = ours.fwd.plan["kernel_id"]
    ours.forward()
    runs, outs = {"ours": ours.forward}, {}
    for name in ("fa2", "cudnn"):
        try:
            run = measure.grouped_forward(name, hq, hk, hv)
            outs[name] = run()
            runs[name] = run
        except RuntimeError as error:
            cell.setdefault("errors", {})[name] = measure.first_line(error)
    if not outs:
        raise RuntimeError(f"no peer ran: {cell['errors']}")
    wants = [("out", ours.out.transpose(1, 2), want) for want in outs.values()]
    measure.verify("decode", wants)
    for name, run in runs.items():
        cell["modes"][name], graph = both_modes(timer, run, cell, name)
        if name == "ours" and graph is not None:  # an empty graph would be fast
            ours.out.fill_(float("nan"))
            graph.replay()
            measure.verify("decode as a graph", wants)
        cell["ms"][name] = round(min(cell["modes"][name].values()), 5)
        cell["gbps"][name] = round(kv_bytes / cell["ms"][name] / 1e6, 1)
        if replay and graph is not None:
            cell.setdefault("replay_us", {})[name] = round(replay_us(graph, 1), 3)
            cell.setdefault("unrolled_us", {})[name] = round(
                replay_us(captured(run, UNROLLED), UNROLLED), 3)
    cell["ratio_best"] = min(ms for n, ms in cell["ms"].items() if n != "ours") / cell["ms"]["ours"]


def both_modes(timer, run, cell, name):
    """({"launched": ms, "replayed": ms}, graph), without the latter where it cannot be captured."""
    modes = {"launched": timer(run)["ms"]}
    try:
        graph = captured(run)
    except RuntimeError as error:
        cell.setdefault("errors", {})[f"{name} as a graph"] = measure.first_line(error)
        return modes, None
    modes["replayed"] = timer(graph.replay)["ms"]
    return modes, graph
