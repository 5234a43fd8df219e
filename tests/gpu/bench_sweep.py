"""The sweep of all shapes and decode: our path beside FlashAttention-2 and cuDNN."""

import torch

import measure
from attn_device import Attention

HIDDEN, TOKENS = 2048, 16384
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
FLASH = "flash_sm80"  # where no --path is given


# ----------------------------------------------------------------------------------- sweep

def sweep_cells():
    for which in ("fwd", "bwd"):
        for dim in (64, 128, 256):
            for causal in (False, True):
                for seqlen in LENGTHS:
                    yield (f"{which}_d{dim}_{'causal' if causal else 'full'}_s{seqlen}",
                           which, dim, causal, seqlen)


def sweep_cell(lib, timer, path, which, dim, causal, seqlen):
    heads, batch = HIDDEN // dim, TOKENS // seqlen
    backward = which == "bwd"
    q, k, v, dout = measure.random_tensors(batch, seqlen, seqlen, heads, heads, dim, torch.bfloat16,
                                           backward)
    hq, hk, hv, hdout = measure.heads_first(q, k, v, dout)
    flops = 4 * batch * seqlen**2 * heads * dim * (0.5 if causal else 1) * (2.5 if backward else 1)
    cell = dict(batch=batch, heads=heads, flops=flops, ms={}, tflops={}, spread={})
    ours = Attention(lib, path, q, k, v, dout, causal=causal)
    ours.forward()
    cell["kernel_id"] = (ours.bwd if backward else ours.fwd).plan["kernel_id"]
    runs = {}
    for peer_class in measure.PEERS:
        try:
            peer = peer_class(hq, hk, hv, causal)
            peer.lse = backward  # as in the anchors
            peer.forward()
            if backward:
                grads = peer.backward(hdout)
            runs[peer.name] = ((lambda p=peer: p.backward(hdout)) if backward
                               else peer.forward)
        except RuntimeError as error:
            cell.setdefault("errors", {})[peer_class.name] = measure.first_line(error)
            continue
        if peer.name == "fa2":
            measure.verify("forward", [("out", ours.out.transpose(1, 2), peer.result[0])])
            if backward:
                ours.backward()
                measure.verify("backward", [
                    (n, got.transpose(1, 2), want)
                    for n, got, want in zip(("dq", "dk", "dv"), ours.grads, grads)])
    runs = {path: ours.backward if backward else ours.forward, **runs}
    for name, run in runs.items():
        times = timer(run)
        cell["ms"][name] = round(times["ms"], 5)
        cell["spread"][name] = [round(times["ms_min"], 5), round(times["ms_p80"], 5)]
        cell["tflops"][name] = round(flops / times["ms"] / 1e9, 1)
    return cell


def ratio_of(cell, peer, path):
    ms = cell["ms"]
    return ms[peer] / ms[path] if peer in ms and path in ms else None


def text(value, form):
    return "-".rjust(7) if value is None else format(value, form)


def sweep(lib, timer, args):
    path, cells = args.path or FLASH, []
    print(f"{'cell':28} {path:>10} {'fa2':>7} {'cudnn':>7} TFLOP/s  {'/fa2':>6} {'/cudnn':>7}")
    for name, which, dim, causal, seqlen in sweep_cells():
        if not measure.selected(name, args.cells):
            continue
        cell = dict(cell=name, which=which, head_dim=dim, causal=causal, seqlen=seqlen)
        with measure.errors_noted(cell, 28):
            cell.update(sweep_cell(lib, timer, path, which, dim, causal, seqlen))
            for peer in ("fa2", "cudnn"):
                cell[f"ratio_{peer}"] = ratio_of(cell, peer, path)
            t = cell["tflops"]
            print(f"{name:28} {t[path]:10.1f} {text(t.get('fa2'), '7.1f')} "
                  f"{text(t.get('cudnn'), '7.1f')}          {text(cell['ratio_fa2'], '6.3f')} "
                  f"{text(cell['ratio_cudnn'], '7.3f')}", flush=True)
        cells.append(cell)
    summary = {}
    for which in ("fwd", "bwd", "all"):
        ratios = [c["ratio_fa2"] for c in cells
                  if c.get("ratio_fa2") and which in (c["which"], "all")]
        if ratios:
            summary[which] = dict(geomean=measure.geomean(ratios), min=min(ratios),
                                  cells=len(ratios))
            print(f"{which}: geometric mean against fa2 {summary[which]['geomean']:.3f}, "
                  f"least {summary[which]['min']:.3f}, {len(ratios)} cells")
    return dict(path=path, complete=not args.cells, cells=cells, summary=summary)


# ---------------------------------------------------------------------------------- decode

HEADS, KV_HEADS, DIM = 32, 8, 128


def decode_cells():
    for batch in (1, 16, 64):
        for keys in (4096, 16384, 65536):
            yield f"b{batch}_k{keys}", batch, keys


def decode(lib, timer, args):
    path, cells = args.path or FLASH, []
    print(f"{'cell':16} {'ours':>8} {'fa2':>8} {'cudnn':>8} GB/s    {'/fa2':>6}  kernel")
    for name, batch, keys in decode_cells():
        if not measure.selected(name, args.cells):
            continue
        cell = dict(cell=name, batch=batch, keys=keys, ms={}, gbps={}, spread={})
        with measure.errors_noted(cell, 16):
            decode_cell(lib, timer, path, cell)
            g = cell["gbps"]
            print(f"{name:16} {g[path]:8.0f} {text(g.get('fa2'), '8.0f')} "
                  f"{text(g.get('cudnn'), '8.0f')}         {text(cell['ratio_fa2'], '6.3f')}"
                  f"  {cell['kernel_id']}", flush=True)
        torch.cuda.empty_cache()
        cells.append(cell)
    return dict(path=path, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM,
                complete=not args.cells, cells=cells)


def decode_cell(lib, timer, path, cell):
    q, k, v, _ = measure.random_tensors(cell["batch"], 1, cell["keys"], HEADS, KV_HEADS, DIM,
                                        torch.bfloat16, False)
    kv_bytes = 2 * k.numel() * k.element_size()
    hq, hk, hv = measure.heads_first(q, k, v)
    ours = Attention(lib, path, q, k, v)
    ours.forward()
    cell["kernel_id"] = ours.fwd.plan["kernel_id"]
    cell["workspace_bytes"] = ours.fwd.plan["workspace_bytes"]
    runs = {path: ours.forward}
    for name in ("fa2", "cudnn"):
        try:
            run = measure.grouped_forward(name, hq, hk, hv)
            out = run()
            if name == "fa2":
                measure.verify("decode", [("out", ours.out.transpose(1, 2), out)])
            runs[name] = run
        except RuntimeError as error:
            if name == "fa2":
                raise
            cell.setdefault("errors", {})[name] = measure.first_line(error)
    for name, run in runs.items():
        times = timer(run)
        cell["ms"][name] = round(times["ms"], 5)
        cell["spread"][name] = [round(times["ms_min"], 5), round(times["ms_p80"], 5)]
        cell["gbps"][name] = round(kv_bytes / times["ms"] / 1e6, 1)
    cell["ratio_fa2"] = ratio_of(cell, "fa2", path)
