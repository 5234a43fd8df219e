"""Burst timing, and the peers through torch's aten operators."""

import contextlib
import fnmatch
import math
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

aten = torch.ops.aten

METHOD = ("burst: pause {pause} s, {warmups} warm-ups, median of {calls} event-timed calls, 256 MB "
          "of L2 cleared before each call outside its interval; ours and the peers one after "
          "another in each cell, on the same tensors; torch's peers by their aten operators")


class Timer:
    """The method of METHOD. Milliseconds."""

    def __init__(self, pause=0.1, warmups=5, calls=20):
        self.pause, self.warmups, self.calls = pause, warmups, calls
        self._flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")

    def method(self):
        return METHOD.format(pause=self.pause, warmups=self.warmups, calls=self.calls)

    def __call__(self, fn, calls=None):
        calls = calls or self.calls
        torch.cuda.synchronize()
        time.sleep(self.pause)
        for _ in range(min(self.warmups, calls)):
            fn()
        events = []
        for _ in range(calls):
            self._flush.zero_()
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            fn()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        times = sorted(begin.elapsed_time(end) for begin, end in events)
        return {"ms": times[len(times) // 2], "ms_min": times[0],
                "ms_p80": times[len(times) * 4 // 5]}


class FlashAttention2:
    """The FlashAttention-2 that torch contains. Tensors are [batch, heads, seqlen, head_dim]."""
    name = "fa2"
    lse = True  # in any case

    def __init__(self, q, k, v, causal, dropout_p=0.0):
        self.q, self.k, self.v, self.causal, self.dropout_p = q, k, v, causal, dropout_p
        self.result = None

    def forward(self):
        self.result = aten._scaled_dot_product_flash_attention(
            self.q, self.k, self.v, self.dropout_p, self.causal)

    def backward(self, dout):
        out, lse, cu_q, cu_k, max_q, max_k, seed, offset = self.result[:8]
        return aten._scaled_dot_product_flash_attention_backward(
            dout, self.q, self.k, self.v, out, lse, cu_q, cu_k, max_q, max_k, self.dropout_p,
            self.causal, seed, offset)


class Cudnn:
    """cuDNN's attention through torch."""
    name = "cudnn"
    lse = True  # which backward needs; forward alone is faster without

    def __init__(self, q, k, v, causal, dropout_p=0.0):
        self.q, self.k, self.v, self.causal, self.dropout_p = q, k, v, causal, dropout_p
        self.result = None

    def forward(self):
        self.result = aten._scaled_dot_product_cudnn_attention(
            self.q, self.k, self.v, None, self.lse, self.dropout_p, self.causal)

    def backward(self, dout):
        out, lse, cu_q, cu_k, max_q, max_k, seed, offset = self.result[:8]
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout, self.q, self.k, self.v, out, lse, seed, offset, None, cu_q, cu_k, max_q, max_k,
            self.dropout_p, self.causal)


PEERS = (FlashAttention2, Cudnn)


def grouped_forward(backend, q, k, v, causal=False):
    """A callable: forward with fewer KV heads, by torch's choice of kernel options."""
    kind = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[backend]

    def run():
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return run


def relative_error(got, want):
    """Frobenius norm of the difference over that of `want`; NaN where either has one."""
    got, want = got.float(), want.float()
    return (torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want)).item()


def verify(label, pairs):
    """Refuses to time a wrong result: bf16 and fp16 kernels differ by under a percent."""
    for name, got, want in pairs:
        error = relative_error(got, want)
        if not error < 0.02:
            raise RuntimeError(f"{label}: {name} differs from the peer by {error:.3g}")


def random_tensors(batch, seqlen_q, seqlen_k, heads, kv_heads, dim, dtype, grad):
    def make(seqlen, n):
        return torch.randn(batch, seqlen, n, dim, device="cuda", dtype=dtype)
    q, k, v = make(seqlen_q, heads), make(seqlen_k, kv_heads), make(seqlen_k, kv_heads)
    return q, k, v, make(seqlen_q, heads) if grad else None


def heads_first(*tensors):
    return [None if t is None else t.transpose(1, 2) for t in tensors]


def selected(name, patterns):
    return not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def geomean(values):
    return math.exp(sum(math.log(v) for v in values) / len(values)) if values else None


def first_line(error):
    return f"{type(error).__name__}: " + str(error).strip().split("\n")[0][:200]


@contextlib.contextmanager
def errors_noted(cell, width=0):
    """A cell that cannot be measured, or that our path declines, says why in cell["error"] and on
    the screen; the next one goes on."""
    try:
        yield
    except RuntimeError as error:
        cell["error"] = first_line(error)
        print(cell["cell"].ljust(width), cell["error"], flush=True)


def roof(timer):
    """Rates of this device, by torch: the ceilings that times are compared with."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    b = torch.randn_like(a)
    ms = timer(lambda: a @ b)["ms"]
    x = torch.empty(1 << 32, device="cuda", dtype=torch.uint8).random_()
    y = torch.empty_like(x)
    copy_ms = timer(lambda: y.copy_(x))["ms"]
    return {"matrix_fp16_8192_flops_per_s": 2 * 8192**3 / ms * 1e3,
            "copy_bytes_per_s": 2 * x.numel() / copy_ms * 1e3}
