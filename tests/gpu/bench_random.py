"""Random calls: each several times, bitwise the same, and beside the next path. What races, hangs or
depends on which multiprocessor took what shows here; how exact results are, tests/exactness tells."""

import contextlib
import itertools
import random
import time

import torch

from attn_device import Attention, Refused

# A path, and what its results are held against.
PAIRS = (("flash_sm90", "flash_sm80"), ("flash_sm80", "standard_cuda"))
SECONDS, SEED, TIMES = 30, 1, 6
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (8, 8), (72, 72),
             (80, 48), (128, 64), (160, 160), (248, 256))
EDGES = (0, 1, 17, 63, 64, 65, 127, 128, 129, 192, 200, 256, 300, 511, 512, 513)
# How far two paths may be apart, in units of 1 + |out|: both may be off by about half of it.
TOLERANCE = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
LSE_TOLERANCE = 1e-3  # times the factor of q
METHOD = (f"random calls for {SECONDS} s, bf16 and fp16: each {TIMES} times on poisoned outputs, "
          "which must be bitwise the same, and once on the next path")


class Draw:
    """One random call. `text` tells it apart."""

    def __init__(self, rng):
        dim, dim_v = rng.choice(HEAD_DIMS)
        dtype = rng.choice((torch.bfloat16, torch.float16))
        kv_heads = rng.choice((1, 2, 3, 4, 8))
        heads = kv_heads * rng.choice((1, 1, 2, 4, 5, 8))
        self.options, self.mask = {}, None
        packed = rng.random() < 0.5
        if packed:
            batch = rng.randrange(1, 24)
            lengths_q = self.lengths(rng, batch, 900)
            lengths_q[0] = max(lengths_q[0], 17)  # fewer are another kernel's
            lengths_k = self.lengths(rng, batch, 1500) if rng.random() < 0.6 else lengths_q
            lengths_k = [max(lengths_k[0], 1), *lengths_k[1:]]
            for name, lengths in (("cu_seqlens_q", lengths_q), ("cu_seqlens_k", lengths_k)):
                self.options[name] = [0, *itertools.accumulate(lengths)]
            rows_q, rows_k = (sum(lengths_q),), (sum(lengths_k),)
        else:
            batch = rng.randrange(1, 9)
            tokens = rng.choice((*EDGES[2:], 1024, rng.randrange(17, 2000)))
            rows_q = batch, tokens
            rows_k = batch, rng.choice((tokens, 1, 64, 100, 2048, 5000, rng.randrange(1, 4000)))
        self.factor = rng.choice((1, 1, 4, 30))
        generator = torch.Generator("cuda").manual_seed(rng.randrange(1 << 30))
        shapes = (*rows_q, heads, dim), (*rows_k, kv_heads, dim), (*rows_k, kv_heads, dim_v)
        q, k, v = (torch.randn(*s, device="cuda", generator=generator) for s in shapes)
        self.tensors = [t.to(dtype) for t in (q * self.factor, k, v)]
        limits = rng.random()
        if limits < 0.4:
            self.options.update(causal=1, top_left=rng.choice((0, 1)))
        elif limits < 0.6:
            self.options.update(window_left=rng.choice((0, 10, 100, 700)),
                                window_right=rng.choice((0, 5, 64, 300)))
        other = rng.random()
        if other < 0.1:
            self.options["softcap"] = 20.0
        elif other < 0.15:
            self.options.update(dropout_p=0.1, dropout_seed=7)
        elif other < 0.3 and not packed:
            block = rng.choice((64, 128))
            blocks = -(-rows_q[1] // block), -(-rows_k[1] // block)
            shown = torch.rand(1, rng.choice((1, heads)), *blocks, device="cuda",
                               generator=generator) < 0.3
            self.mask = shown.to(torch.uint8)
            self.options.update(block_q=block, block_k=block)
        self.text = (f"{dtype} q {tuple(q.shape)} k {tuple(k.shape)} v {tuple(v.shape)} "
                     f"times {self.factor} {self.options}")

    @staticmethod
    def lengths(rng, count, top):
        return [rng.choice((*EDGES, rng.randrange(top))) for _ in range(count)]

    def call(self, lib, path):
        return Attention(lib, path, *self.tensors, mask=self.mask, **self.options)


def results(attention):
    """out and lse of one run, on outputs poisoned before."""
    attention.out.fill_(float("nan"))
    attention.lse.fill_(float("nan"))
    attention.forward()
    return attention.out.clone(), attention.lse.clone()


def same_bits(a, b):
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b))


def fault(draw, ours, other):
    """(what is wrong or None, largest difference of out over its tolerance)."""
    first = results(ours)
    if any(not same_bits(first, results(ours)) for _ in range(TIMES - 1)):
        return "not bitwise the same", None
    want = results(other)
    out, want_out = first[0].double(), want[0].double()
    if not torch.isfinite(out).all():
        return "out is not finite", None
    tolerance = TOLERANCE[first[0].dtype]
    worst = ((out - want_out).abs() / (1 + want_out.abs())).max().item() / tolerance
    finite = torch.isfinite(want[1])
    if not torch.equal(first[1][~finite], want[1][~finite]) or \
            not torch.isfinite(first[1][finite]).all():
        return "lse is infinite, or NaN, in other rows", worst
    apart = (first[1] - want[1])[finite].abs()
    if apart.numel() and apart.max().item() > LSE_TOLERANCE * draw.factor:
        return f"lse is {apart.max().item():.3g} apart", worst
    return (None if worst <= 1 else f"out is {worst:.3g} tolerances apart"), worst


def random_calls(lib, timer, args):
    paths = [path for path, _ in PAIRS]
    rng, cells = random.Random(SEED), {path: dict(calls=0, kernels={}, worst=0.0) for path in paths}
    failures, number, end = [], 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        draw = Draw(rng)
        calls = {}
        for path in dict.fromkeys(itertools.chain(*PAIRS)):
            with contextlib.suppress(Refused):
                calls[path] = draw.call(lib, path)
        for path, other in PAIRS:
            if path not in calls:
                continue
            ours = calls[path]
            wrong, worst = fault(draw, ours, calls[other])
            cell, kernel = cells[path], ours.fwd.plan["kernel_id"]
            cell["calls"] += 1
            cell["kernels"][kernel] = cell["kernels"].get(kernel, 0) + 1
            cell["worst"] = max(cell["worst"], worst or 0.0)
            if wrong:
                failures.append(dict(number=number, path=path, kernel=kernel, wrong=wrong,
                                     call=draw.text))
                print(f"call {number} on {path}, {kernel}: {wrong}: {draw.text}", flush=True)
        number += 1
    for path, cell in cells.items():
        print(f"{path}: {cell['calls']} calls, {len(cell['kernels'])} kernels, largest difference "
              f"{cell['worst']:.3f} of its tolerance")
    return dict(seed=SEED, times=TIMES, pairs=dict(PAIRS), paths=cells, failures=failures,
                capability=torch.cuda.get_device_capability(), method=METHOD)
