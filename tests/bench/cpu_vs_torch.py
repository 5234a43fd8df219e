#!/usr/bin/env python3
"""flash_cpu against PyTorch's CPU scaled_dot_product_attention, forward and backward.

Both run on the same cores with the same number of threads, on the same numbers in the same dtype, in
one run, by turns: one call of PyTorch, one of flash_cpu, and so on; a cell's ratio is the median of
PyTorch's times over the median of ours (over 1: we are faster). PyTorch's tensors lie as
[batch, heads, S, dim], the layout that it is fastest with, ours as [batch, S, heads, dim], the layout
of the wire. PyTorch's backward is the operator that its autograd calls, without autograd. Before
a cell is timed, our results are checked against PyTorch's float64 mathematics.

Needs PyTorch (PyPI `torch`; a CPU build is enough) and the program attn_cpu_bench. Prints a table
and ends with `cpu-vs-torch: <geometric mean, fp32> (bar: 0.70)`; exit status 0 only where it holds.
"""

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import torch

BAR = 0.70
HEADS = 8
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Largest error against float64, relative to the tensor's largest entry: a check that both compute
# the same thing. The exactness tests hold flash_cpu to far tighter bounds.
TOLERANCE = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 3e-2}


class Ours:
    """flash_cpu, as a process that runs calls on request."""

    def __init__(self, program, threads):
        self.process = subprocess.Popen(
            [program, "serve", str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if not answer or answer.startswith("error"):
            sys.exit(f"attn_cpu_bench: {line}: {answer or 'ended'}")
        return answer

    def time_ns(self, direction):
        return int(self.ask(f"time {direction}"))

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=30)


def write(folder, name, tensor):
    """Stores [batch, heads, S, dim] as [batch, S, heads, dim]."""
    raw = tensor.transpose(1, 2).contiguous().view(torch.uint8)
    raw.numpy().tofile(os.path.join(folder, name + ".bin"))


def read(folder, name, like):
    batch, heads, s, dim = like.shape
    with open(os.path.join(folder, name + ".bin"), "rb") as file:
        raw = torch.frombuffer(bytearray(file.read()), dtype=like.dtype)
    return raw.view(batch, s, heads, dim).transpose(1, 2)


def reference(q, k, v, dout, causal):
    """One head of the last batch entry in float64: out, dq, dk, dv, by plain autograd."""
    q, k, v, dout = (t[-1, -1].double() for t in (q, k, v, dout))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    scores = q @ k.T / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    out = torch.softmax(scores, -1) @ v
    out.backward(dout)
    return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def check(folder, q, k, v, dout, causal, dtype):
    want = reference(q, k, v, dout, causal)
    for name, expected in want.items():
        got = read(folder, name, q)[-1, -1].double()
        error = (got - expected).abs().max().item() / expected.abs().max().item()
        if not error <= TOLERANCE[dtype]:
            sys.exit(f"wrong result: {name}, {dtype}, S {q.shape[2]}, dim {q.shape[3]}, causal "
                     f"{causal}: error {error:.3g} of the largest entry, limit {TOLERANCE[dtype]:.3g}")


def timed(work):
    start = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - start


def cell(ours, folder, dtype, tokens, s, dim, causal, seconds):
    """Yields (direction, torch ns, our ns), medians."""
    generator = torch.Generator().manual_seed(s * 1000 + dim + int(causal))
    shape = (max(1, tokens // s), HEADS, s, dim)
    q, k, v, dout = (torch.randn(shape, generator=generator).to(DTYPES[dtype]) for _ in range(4))
    for name, tensor in (("q", q), ("k", k), ("v", v), ("dout", dout)):
        write(folder, name, tensor)
    ours.ask(f"call flash_cpu {dtype} {shape[0]} {s} {HEADS} {dim} {int(causal)} {folder}")
    check(folder, q, k, v, dout, causal, dtype)

    ops = torch.ops.aten
    out, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    directions = {
        "forward": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal),
        "backward": lambda: ops._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal),
    }
    for direction, work in directions.items():
        theirs_ns, ours_ns = [], []
        for _ in range(2):  # warm-up
            work()
            ours.time_ns(direction)
        end = time.monotonic() + seconds
        while len(ours_ns) < 5 or (time.monotonic() < end and len(ours_ns) < 200):
            theirs_ns.append(timed(work))
            # PyTorch's threads spin for a while after a call; let them go to sleep before ours start.
            time.sleep(0.005)
            ours_ns.append(ours.time_ns(direction))
        yield direction, statistics.median(theirs_ns), statistics.median(ours_ns)


def geomean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bench", default=shutil.which("attn_cpu_bench"), help="path of attn_cpu_bench")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--sizes", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--tokens", type=int, default=4096, help="batch * S in every cell")
    parser.add_argument("--seconds", type=float, default=1.0, help="time per cell and direction")
    args = parser.parse_args()
    if not args.bench:
        parser.error("attn_cpu_bench not found; pass --bench")
    torch.set_num_threads(args.threads)
    print(f"PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, "
          f"{args.threads} threads, {args.tokens} tokens, {HEADS} heads; load average "
          f"{os.getloadavg()[0]:.1f}")
    print(f"{'dtype':6} {'S':>5} {'dim':>4} {'causal':>6} {'pass':>9} {'torch ms':>10} {'ours ms':>10} "
          f"{'ours GF/s':>10} {'ratio':>6}")
    ours = Ours(args.bench, args.threads)
    ratios = {}
    folder = tempfile.mkdtemp(prefix="attn_cpu_vs_torch_")
    try:
        for dtype in args.dtypes:
            for s in args.sizes:
                for dim in (64, 128):
                    for causal in (False, True):
                        for direction, theirs, mine in cell(ours, folder, dtype, args.tokens, s, dim, causal,
                                                            args.seconds):
                            flops = 4.0 * max(args.tokens, s) * s * HEADS * dim * (0.5 if causal else 1.0)
                            flops *= 2.5 if direction == "backward" else 1.0
                            ratio = theirs / mine
                            ratios.setdefault((dtype, direction), []).append(ratio)
                            print(f"{dtype:6} {s:5} {dim:4} {causal!s:>6} {direction:>9} {theirs / 1e6:10.3f} "
                                  f"{mine / 1e6:10.3f} {flops / mine:10.1f} {ratio:6.2f}", flush=True)
    finally:
        shutil.rmtree(folder)
        ours.close()
    for (dtype, direction), values in ratios.items():
        print(f"{dtype} {direction}: geometric mean {geomean(values):.2f}, lowest {min(values):.2f}, "
              f"highest {max(values):.2f}")
    if "fp32" not in args.dtypes:
        sys.exit("the bar is for fp32, which was not measured")
    result = geomean(ratios[("fp32", "forward")] + ratios[("fp32", "backward")])
    print(f"cpu-vs-torch: {result:.2f} (bar: {BAR:.2f})")
    sys.exit(0 if result >= BAR else 1)


if __name__ == "__main__":
    main()
