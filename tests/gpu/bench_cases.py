"""GPT-2 medium, block-sparse masks, memory, and deterministic backward."""

import torch

import measure
from attn_device import Attention, Refused

FLASH, STANDARD = "flash_sm80", "standard_cuda"


# ------------------------------------------------------------------------------- GPT-2 medium

GPT2 = dict(batch=64, heads=16, seqlen=1024, dim=64)


def gpt2(lib, timer, args):
    """The landmark of the FlashAttention paper: attention of GPT-2 medium, fp16."""
    roof = measure.roof(timer)
    torch.cuda.empty_cache()
    print(f"copy {roof['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
          f"matrix {roof['matrix_fp16_8192_flops_per_s'] / 1e12:.0f} TFLOP/s")
    cases = []
    for causal in (False, True):
        for dropout in (0.0, 0.1):
            case = dict(causal=causal, dropout_p=dropout, runs={})
            for name in (FLASH, STANDARD, "fa2", "cudnn"):
                try:
                    case["runs"][name] = gpt2_run(lib, timer, name, causal, dropout, roof)
                except RuntimeError as error:
                    case["runs"][name] = {"error": measure.first_line(error)}
                torch.cuda.empty_cache()
                print(f"causal={int(causal)} dropout={dropout} {name:14}", {
                    k: v for k, v in case["runs"][name].items() if not isinstance(v, dict)},
                      flush=True)
            cases.append(case)
    return dict(shape=GPT2, dtype="fp16", roof=roof, library_roof=lib.roofline(), cases=cases)


def gpt2_run(lib, timer, name, causal, dropout, roof):
    batch, heads, seqlen, dim = (GPT2[n] for n in ("batch", "heads", "seqlen", "dim"))
    q, k, v, dout = measure.random_tensors(batch, seqlen, seqlen, heads, heads, dim,
                                           torch.float16, True)
    run = {}
    if name in (FLASH, STANDARD):
        options = dict(dropout_p=dropout, dropout_seed=7) if dropout else {}
        ours = Attention(lib, name, q, k, v, dout, causal=causal, **options)
        forward, backward = ours.forward, ours.backward
        for which, call in (("fwd", ours.fwd), ("bwd", ours.bwd)):
            run[which] = dict(call.plan)
        budget = sum(run[w]["tile_bytes"] / roof["copy_bytes_per_s"] +
                     run[w]["flops"] / roof["matrix_fp16_8192_flops_per_s"]
                     for w in ("fwd", "bwd"))
        run["model_budget_ms"] = budget * 1e3
        forward()
        if not dropout:  # another mask drops other pairs
            gpt2_verify(ours, q, k, v, dout, causal)
    else:
        peer_class = {p.name: p for p in measure.PEERS}[name]
        hq, hk, hv, hdout = measure.heads_first(q, k, v, dout)
        peer = peer_class(hq, hk, hv, causal, dropout)
        forward = peer.forward
        forward()

        def backward():
            peer.backward(hdout)

    def both():
        forward()
        backward()
    run["fwd_ms"] = timer(forward)["ms"]
    run["bwd_ms"] = timer(backward)["ms"]
    times = timer(both)
    run["ms"], run["ms_min"], run["ms_p80"] = times["ms"], times["ms_min"], times["ms_p80"]
    if "model_budget_ms" in run:
        run["ms_over_budget"] = run["ms"] / run["model_budget_ms"]
    return run


def gpt2_verify(ours, q, k, v, dout, causal):
    ours.backward()
    hq, hk, hv, hdout = measure.heads_first(q, k, v, dout)
    peer = measure.FlashAttention2(hq, hk, hv, causal)
    peer.forward()
    grads = peer.backward(hdout)
    measure.verify("gpt2", [("out", ours.out.transpose(1, 2), peer.result[0])] +
                   [(n, got.transpose(1, 2), want)
                    for n, got, want in zip(("dq", "dk", "dv"), ours.grads, grads)])


# ------------------------------------------------------------------------------- block-sparse

SPARSE = dict(batch=1, heads=4, seqlen=65536, dim=128, block_q=128, block_k=128)
DENSITIES = (0.05, 0.1, 0.2, 0.35, 0.5)


def block_sparse(lib, timer, args):
    heads, seqlen, dim = SPARSE["heads"], SPARSE["seqlen"], SPARSE["dim"]
    q, k, v, dout = measure.random_tensors(1, seqlen, seqlen, heads, heads, dim, torch.bfloat16,
                                           True)
    dense = Attention(lib, FLASH, q, k, v, dout)
    dense_ms = {"fwd": timer(dense.forward, calls=7)["ms"],
                "bwd": timer(dense.backward, calls=7)["ms"]}
    del dense
    print("dense", dense_ms, flush=True)
    rows, cols = seqlen // SPARSE["block_q"], seqlen // SPARSE["block_k"]
    cells = []
    for density in DENSITIES:
        # Another mask for each head; each pair of blocks is shown with the same probability.
        mask = (torch.rand(1, heads, rows, cols, device="cuda") < density).to(torch.uint8)
        share = mask.float().mean().item()
        ours = Attention(lib, FLASH, q, k, v, dout, mask=mask, block_q=SPARSE["block_q"],
                         block_k=SPARSE["block_k"])
        ours.forward()
        verify_rows(ours, q, k, v, mask)
        cell = dict(density=share, ms={}, over_dense={})
        for which, run in (("fwd", ours.forward), ("bwd", ours.backward)):
            ms = timer(run, calls=10)["ms"]
            cell["ms"][which] = ms
            cell["over_dense"][which] = ms / (share * dense_ms[which])
        cells.append(cell)
        print(f"density {share:.4f}", cell["ms"], "over density x dense", cell["over_dense"],
              flush=True)
        del ours
    return dict(shape=SPARSE, dtype="bf16", path=FLASH, dense_ms=dense_ms, cells=cells)


def verify_rows(ours, q, k, v, mask):
    """The queries of three blocks of rows, against a float32 softmax over what the mask shows."""
    block_q, block_k, dim = SPARSE["block_q"], SPARSE["block_k"], SPARSE["dim"]
    for head, row in ((0, 0), (1, mask.shape[2] // 2), (SPARSE["heads"] - 1, mask.shape[2] - 1)):
        span = slice(row * block_q, (row + 1) * block_q)
        scores = q[0, span, head].float() @ k[0, :, head].float().T / dim**0.5
        shown = mask[0, head, row].bool().repeat_interleave(block_k)
        scores.masked_fill_(~shown, float("-inf"))
        want = scores.softmax(-1).nan_to_num() @ v[0, :, head].float()
        measure.verify("block-sparse", [(f"out of block {row}", ours.out[0, span, head], want)])


# ------------------------------------------------------------------------------------- memory

MEMORY_LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)


def memory(lib, timer, args):
    """Device memory of forward + backward: what the driver says is gone while the call's tensors
    and workspace are there and after it ran, so that nothing is missed that a kernel takes."""
    series = []
    for dim, heads in ((64, 16), (128, 16)):
        device_bytes(lib, FLASH, MEMORY_LENGTHS[0], heads, dim)  # loads the kernels
        device_bytes(lib, STANDARD, MEMORY_LENGTHS[0], heads, dim)
        points = []
        for seqlen in MEMORY_LENGTHS:
            point = dict(seqlen=seqlen, flash=device_bytes(lib, FLASH, seqlen, heads, dim),
                         standard=device_bytes(lib, STANDARD, seqlen, heads, dim))
            # S and dP of every head in fp32, beside the tensors.
            point["standard_unchunked_bytes"] = (point["flash"]["tensor_bytes"] +
                                                 2 * 4 * heads * seqlen**2)
            points.append(point)
            print(f"d{dim} S {seqlen:6}: flash {point['flash']['device_bytes'] / 2**20:9.1f} MiB, "
                  f"standard {point['standard']}", flush=True)
        growth = [after["flash"]["device_bytes"] / before["flash"]["device_bytes"]
                  for before, after in zip(points, points[1:])]
        series.append(dict(head_dim=dim, heads=heads, batch=1, causal=True, points=points,
                           growth=growth))
    return dict(dtype="bf16", series=series)


def device_bytes(lib, path, seqlen, heads, dim):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    try:
        q, k, v, dout = measure.random_tensors(1, seqlen, seqlen, heads, heads, dim,
                                               torch.bfloat16, True)
        ours = Attention(lib, path, q, k, v, dout, causal=True)
    except Refused as error:
        return {"refused": measure.first_line(error)}
    ours.forward()
    ours.backward()
    torch.cuda.synchronize()
    tensors = [q, k, v, dout, ours.out, ours.lse, *ours.grads]
    return {"device_bytes": free - torch.cuda.mem_get_info()[0],
            "tensor_bytes": sum(t.numel() * t.element_size() for t in tensors),
            "workspace_bytes": {"fwd": ours.fwd.plan["workspace_bytes"],
                                "bwd": ours.bwd.plan["workspace_bytes"]}}


# ------------------------------------------------------------------------------ deterministic

def deterministic(lib, timer, args):
    """Backward with deterministic = true: bitwise the same 30 times, and what it costs."""
    cells = []
    for batch, seqlen, heads, kv_heads, dim, causal in (
            (4, 4096, 32, 32, 64, True), (8, 2048, 16, 16, 128, False),
            (4, 4096, 16, 4, 128, True), (4, 4096, 8, 8, 256, True)):
        q, k, v, dout = measure.random_tensors(batch, seqlen, seqlen, heads, kv_heads, dim,
                                               torch.bfloat16, True)
        fixed = Attention(lib, FLASH, q, k, v, dout, causal=causal, deterministic=1)
        fixed.forward()
        fixed.backward()
        first = [g.clone() for g in fixed.grads]
        equal = 1
        for _ in range(29):
            for g in fixed.grads:
                g.fill_(float("nan"))
            fixed.backward()
            equal += all(torch.equal(a, b) for a, b in zip(first, fixed.grads))
        free = Attention(lib, FLASH, q, k, v, dout, causal=causal)
        free.forward()
        cell = dict(batch=batch, seqlen=seqlen, heads=heads, kv_heads=kv_heads, head_dim=dim,
                    causal=causal, runs=30, equal_runs=equal,
                    deterministic_ms=timer(fixed.backward, calls=10)["ms"],
                    ms=timer(free.backward, calls=10)["ms"])
        cells.append(cell)
        print(cell, flush=True)
    return dict(path=FLASH, dtype="bf16", cells=cells)
