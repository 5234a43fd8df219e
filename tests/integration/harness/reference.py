"""Attention and its gradients in float64, and the bound each element must meet.

Written for clarity: one sequence and one head at a time, the whole score matrix at once. The bounds
are the project's exactness rule: every result element must lie within them.
"""

import dataclasses

import numpy as np

from harness.contract import pb

_U = {pb.DTYPE_BF16: 2.0 ** -8, pb.DTYPE_FP16: 2.0 ** -11, pb.DTYPE_FP32: 2.0 ** -22}


def _eta(dtype):
    return 2.0 ** -25 if dtype == pb.DTYPE_FP16 else 2.0 ** -100


@dataclasses.dataclass
class Expected:
    value: np.ndarray
    bound: np.ndarray

    @staticmethod
    def zeros(shape):
        return Expected(np.zeros(shape), np.zeros(shape))


def worst_ratio(actual, expected):
    """max(error / bound). Infinities must be equal; NaN never is. 0 where there are no elements."""
    if actual.shape != expected.value.shape:
        raise AssertionError(f"shape {actual.shape}, expected {expected.value.shape}")
    if actual.size == 0:
        return 0.0
    if np.isnan(actual).any():
        return np.inf
    infinite = np.isinf(expected.value)
    if (actual[infinite] != expected.value[infinite]).any():
        return np.inf
    error = np.abs(actual[~infinite] - expected.value[~infinite])
    bound = expected.bound[~infinite]
    if error.size == 0:
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error == 0, 0.0, error / bound)
    return float(np.nan_to_num(ratio, nan=np.inf).max())


# ----------------------------------------------------------------------------------------- dropout

def philox4x32(counter, key):
    """Philox4x32-10 on uint64 arrays that hold 32-bit words. Salmon et al., SC'11."""
    c = [np.asarray(x, np.uint64) for x in counter]
    k0, k1 = key
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * c[0]
        p1 = np.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> shift) ^ c[1] ^ np.uint64(k0), p1 & mask,
             (p0 >> shift) ^ c[3] ^ np.uint64(k1), p0 & mask]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def dropout_factors(dropout, head, len_q, len_k):
    """[len_q, len_k]: 0 where dropped, 65536 / T where kept."""
    p, seed, offset = dropout
    threshold = int(np.floor(65536.0 * (1.0 - float(np.float32(p))) + 0.5))
    j_blocks = -(-len_k // 8)
    j, i = np.meshgrid(np.arange(j_blocks, dtype=np.uint64), np.arange(len_q, dtype=np.uint64))
    zero = np.zeros_like(i)
    words = philox4x32([j, i, zero + np.uint64(head), zero + np.uint64(offset)],
                       (seed & 0xFFFFFFFF, seed >> 32))
    lanes = []
    for word in words:
        lanes += [word & np.uint64(0xFFFF), word >> np.uint64(16)]
    lanes = np.stack(lanes, axis=-1).reshape(len_q, j_blocks * 8)[:, :len_k]
    return np.where(lanes < threshold, 65536.0 / threshold, 0.0)


# ---------------------------------------------------------------------------------- one head's part

@dataclasses.dataclass
class Head:
    """Softmax of one (sequence, query head): everything is [len_q, len_k] or [len_q]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    p: np.ndarray
    keep: np.ndarray
    dcap: np.ndarray  # derivative of the softcap, 1 where there is none
    lse: np.ndarray
    out: np.ndarray
    c: np.ndarray  # rounding of the logits
    sink: float


def _sequences(case):
    """(batch index, q rows, k rows) of each sequence, as index tuples into q and k."""
    for b in range(case.batch):
        if case.thd:
            yield b, slice(case.cu_q[b], case.cu_q[b + 1]), slice(case.cu_k[b], case.cu_k[b + 1])
        else:
            len_q = case.seqlens_q[b] if case.seqlens_q else case.q.shape[1]
            len_k = case.seqlens_k[b] if case.seqlens_k else case.k.shape[1]
            yield b, (b, slice(0, len_q)), (b, slice(0, len_k))


def _visible(case, b, h, len_q, len_k):
    off = 0 if case.top_left else len_k - len_q
    position = np.arange(len_q)[:, None] + off
    j = np.arange(len_k)[None, :]
    visible = np.ones((len_q, len_k), bool)
    if case.window_left is not None:
        visible &= j >= position - case.window_left
    right = 0 if case.causal else case.window_right
    if right is not None:
        visible &= j <= position + right
    if case.block_mask is not None:
        m = case.block_mask[b if case.block_mask.shape[0] > 1 else 0,
                            h if case.block_mask.shape[1] > 1 else 0]
        rows = np.arange(len_q) // case.block[0]
        cols = np.arange(len_k) // case.block[1]
        visible &= m[np.ix_(rows, cols)] != 0
    return visible, np.abs(position - j).astype(np.float64)


def _bias(case, b, h, rows_q, len_q, len_k):
    bias_h = case.bias[..., h if case.bias.shape[-3] > 1 else 0, :, :]
    if case.thd:
        return bias_h[rows_q, :len_k]
    return bias_h[b if case.bias.shape[0] > 1 else 0, :len_q, :len_k]


def _head(case, b, h, rows_q, rows_k):
    group = case.num_heads // case.num_kv_heads
    q, k, v = case.q[rows_q][:, h], case.k[rows_k][:, h // group], case.v[rows_k][:, h // group]
    len_q, len_k = len(q), len(k)
    visible, distance = _visible(case, b, h, len_q, len_k)
    scale = case.softmax_scale
    s = scale * (q @ k.T)
    size = abs(scale) * (np.abs(q) @ np.abs(k).T)
    dcap = np.ones_like(s)
    if case.softcap is not None:
        cap = float(np.float32(case.softcap))
        # sech^2 rather than 1 - tanh^2, which cancels where the cap saturates.
        e = np.exp(-2.0 * np.abs(s / cap))
        s, dcap = cap * np.tanh(s / cap), 4.0 * e / (1.0 + e) ** 2
    if case.bias is not None:
        bias = _bias(case, b, h, rows_q, len_q, len_k)
        visible = visible & ~np.isneginf(bias)
        bias = np.where(np.isneginf(bias), 0.0, bias)
        s, size = s + bias, size + np.abs(bias)
    if case.alibi is not None:
        slope = case.alibi[b, h] if case.alibi.ndim == 2 else case.alibi[h]
        s, size = s - slope * distance, size + np.abs(slope) * distance
    sink = case.sinks[h] if case.sinks is not None else -np.inf

    s = np.where(visible, s, -np.inf)
    top = np.maximum(s.max(axis=1, initial=-np.inf), sink)
    safe_top = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(s - safe_top[:, None])
    total = weights.sum(axis=1) + np.exp(sink - safe_top)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.where(total[:, None] > 0, weights / total[:, None], 0.0)
        lse = np.where(total > 0, safe_top + np.log(total), -np.inf)
    keep = np.ones_like(p)
    if case.dropout is not None:
        keep = dropout_factors(case.dropout, b * case.num_heads + h, len_q, len_k)
    c = 2.0 ** -20 * np.maximum(np.where(visible, size, 0.0).max(axis=1, initial=0.0),
                                0.0 if np.isneginf(sink) else abs(sink))
    if case.softcap is not None:
        c = c + 2.0 ** -20
    return Head(q, k, v, p, keep, dcap, lse, (p * keep) @ v, c, sink)


# ------------------------------------------------------------------------------------------- passes

def forward(case):
    """{"out": Expected, "lse": Expected} in the layouts of the reply."""
    u, eta = _U[case.dtype], _eta(case.dtype)
    out = Expected.zeros(case.out_shape)
    lse = Expected(np.full(case.lse_shape, -np.inf), np.zeros(case.lse_shape))
    for b, rows_q, rows_k in _sequences(case):
        for h in range(case.num_heads):
            head = _head(case, b, h, rows_q, rows_k)
            out.value[rows_q][:, h] = head.out
            out.bound[rows_q][:, h] = (
                u * np.abs(head.out) + (u + head.c)[:, None] * ((head.p * head.keep) @ np.abs(head.v))
                + eta * (1 + np.abs(head.v).sum(axis=0)))
            row = (h, rows_q) if case.thd else (b, h, rows_q[1])
            lse.value[row] = head.lse
            finite = np.where(np.isinf(head.lse), 0.0, head.lse)
            lse.bound[row] = 1e-5 * np.maximum(1.0, np.abs(finite)) + head.c
    return {"out": out, "lse": lse}


def backward(case, dout, dlse=None):
    """{"dq", "dk", "dv" and, where asked for, "dbias", "dsink": Expected}."""
    u, eta = _U[case.dtype], _eta(case.dtype)
    grads = {name: Expected.zeros(getattr(case, name).shape) for name in ("q", "k", "v")}
    dbias = Expected.zeros(case.bias.shape) if case.bias is not None else None
    dsink = Expected.zeros(case.sinks.shape) if case.sinks is not None else None
    group = case.num_heads // case.num_kv_heads
    scale = case.softmax_scale
    for b, rows_q, rows_k in _sequences(case):
        for h in range(case.num_heads):
            kv = h // group
            head = _head(case, b, h, rows_q, rows_k)
            do = dout[rows_q][:, h]
            row = (h, rows_q) if case.thd else (b, h, rows_q[1])
            dl = dlse[row] if dlse is not None else np.zeros(len(do))
            # A row without a visible key and without a sink takes no part, whatever its dlse.
            dl = np.where(np.isneginf(head.lse), 0.0, dl)
            a = (np.abs(do) * np.abs(head.out)).sum(axis=1)
            row_dot = (do * head.out).sum(axis=1)
            dp = (do @ head.v.T) * head.keep
            ds = head.p * (dp - row_dot[:, None] + dl[:, None])
            size_dp = (np.abs(do) @ np.abs(head.v).T) * head.keep
            w = ((u + head.c)[:, None] * (np.abs(ds) + head.p * (a + np.abs(dl))[:, None])
                 + 2.0 ** -22 * head.p * size_dp)
            # eta is what storing a ds in 16 bits can cost, so the softcap's slope does not shrink it.
            ds_t, w_t, w = ds * head.dcap, w * head.dcap + eta, w + eta
            grads["q"].value[rows_q][:, h] += scale * ds_t @ head.k
            grads["q"].bound[rows_q][:, h] += abs(scale) * w_t @ np.abs(head.k)
            grads["k"].value[rows_k][:, kv] += scale * ds_t.T @ head.q
            grads["k"].bound[rows_k][:, kv] += abs(scale) * w_t.T @ np.abs(head.q)
            pk = head.p * head.keep
            grads["v"].value[rows_k][:, kv] += pk.T @ do
            grads["v"].bound[rows_k][:, kv] += ((u + head.c)[:, None] * pk + eta).T @ np.abs(do)
            if dbias is not None:
                for target, values in ((dbias.value, ds), (dbias.bound, w)):
                    _bias(dataclasses.replace(case, bias=target), b, h, rows_q, len(do),
                          len(head.k))[...] += values
            if dsink is not None and not np.isneginf(head.sink):
                mass = np.exp(head.sink - head.lse)
                dsink.value[h] += (mass * (dl - row_dot)).sum()
                dsink.bound[h] += ((u + head.c) * mass * (a + np.abs(dl)) * 2).sum() + eta
    for expected in grads.values():
        expected.bound += u * np.abs(expected.value) + eta
    result = {f"d{name}": expected for name, expected in grads.items()}
    if dbias is not None:
        dbias.bound += 2.0 ** -22 * np.abs(dbias.value) + eta
        result["dbias"] = dbias
    if dsink is not None:
        dsink.bound += 2.0 ** -22 * np.abs(dsink.value) + eta
        result["dsink"] = dsink
    return result
