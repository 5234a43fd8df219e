"""Random attention calls: a Case holds values and options, and writes the messages for them."""

import dataclasses
from typing import Optional

import numpy as np

from harness.contract import from_bytes, item_size, pb, round_to, tensor, to_bytes

FLOAT_DTYPES = (pb.DTYPE_FP32, pb.DTYPE_FP16, pb.DTYPE_BF16)
INPUTS = ("q", "k", "v")


@dataclasses.dataclass
class Case:
    """One call. Tensor values are float64 and already rounded to the dtype they are sent in."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dtype: int = pb.DTYPE_FP32
    thd: bool = False
    cu_q: tuple = ()
    cu_k: tuple = ()
    scale: Optional[float] = None
    causal: bool = False
    top_left: bool = False
    window_left: Optional[int] = None
    window_right: Optional[int] = None
    seqlens_q: tuple = ()
    seqlens_k: tuple = ()
    softcap: Optional[float] = None
    alibi: Optional[np.ndarray] = None
    bias: Optional[np.ndarray] = None
    bias_dtype: int = pb.DTYPE_FP32
    sinks: Optional[np.ndarray] = None
    dropout: Optional[tuple] = None  # (p, seed, offset)
    block_mask: Optional[np.ndarray] = None
    block: tuple = (128, 128)
    deterministic: bool = False
    out_dtype: int = pb.DTYPE_UNSPECIFIED
    policy: Optional[pb.PathPolicy] = None
    report_level: int = pb.REPORT_LEVEL_UNSPECIFIED
    strided: tuple = ()  # names of q, k, v to send with gaps, NaN in the gaps

    @property
    def num_heads(self):
        return self.q.shape[-2]

    @property
    def num_kv_heads(self):
        return self.k.shape[-2]

    @property
    def head_dim(self):
        return self.q.shape[-1]

    @property
    def head_dim_v(self):
        return self.v.shape[-1]

    @property
    def batch(self):
        return len(self.cu_q) - 1 if self.thd else self.q.shape[0]

    @property
    def softmax_scale(self):
        # The contract's scale is a float.
        return float(np.float32(self.scale if self.scale is not None else self.head_dim ** -0.5))

    @property
    def result_dtype(self):
        return self.out_dtype or self.dtype

    @property
    def out_shape(self):
        return self.q.shape[:-1] + (self.head_dim_v,)

    @property
    def lse_shape(self):
        if self.thd:
            return (self.num_heads, self.q.shape[0])
        return (self.q.shape[0], self.num_heads, self.q.shape[1])

    # ------------------------------------------------------------------------------------ messages

    def _shape(self):
        return pb.AttentionShape(
            layout=pb.LAYOUT_THD if self.thd else pb.LAYOUT_BSHD, num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads, cu_seqlens_q=self.cu_q, cu_seqlens_k=self.cu_k)

    def _options(self, payloads):
        o = pb.AttentionOptions(causal=self.causal, seqlens_q=self.seqlens_q,
                                seqlens_k=self.seqlens_k, deterministic=self.deterministic,
                                out_dtype=self.out_dtype)
        for name, value in (("softmax_scale", self.scale), ("window_left", self.window_left),
                            ("window_right", self.window_right), ("softcap", self.softcap)):
            if value is not None:
                setattr(o, name, value)
        if self.top_left:
            o.alignment = pb.ALIGNMENT_TOP_LEFT

        def put(field, values, dtype):
            field.CopyFrom(tensor(dtype, values.shape, len(payloads)))
            payloads.append(to_bytes(values, dtype))

        if self.alibi is not None:
            put(o.alibi_slopes, self.alibi, pb.DTYPE_FP32)
        if self.bias is not None:
            put(o.bias, self.bias, self.bias_dtype)
        if self.sinks is not None:
            put(o.sinks, self.sinks, pb.DTYPE_FP32)
        if self.dropout is not None:
            p, seed, offset = self.dropout
            o.dropout.CopyFrom(pb.Dropout(p=p, seed=seed, offset=offset))
        if self.block_mask is not None:
            put(o.block_mask.mask, self.block_mask, pb.DTYPE_UINT8)
            o.block_mask.block_q, o.block_mask.block_k = self.block
        return o

    def _common(self, header):
        payloads = []
        for name in INPUTS:
            values = getattr(self, name)
            strides = ()
            if name in self.strided:
                padded = np.full(values.shape[:-1] + (values.shape[-1] + 3,), np.nan)
                padded[..., :values.shape[-1]] = values
                strides = [int(s) // padded.itemsize for s in padded.strides]
                getattr(header, name).CopyFrom(
                    tensor(self.dtype, values.shape, len(payloads), strides))
                # A payload ends with its last element: the last row has no gap behind it.
                values = padded.reshape(-1)[:padded.size - 3 if padded.size else 0]
            else:
                getattr(header, name).CopyFrom(tensor(self.dtype, values.shape, len(payloads)))
            payloads.append(to_bytes(values, self.dtype))
        header.shape.CopyFrom(self._shape())
        header.options.CopyFrom(self._options(payloads))
        if self.policy is not None:
            header.path_policy.CopyFrom(self.policy)
        header.report_level = self.report_level
        return payloads

    def forward(self):
        """(ForwardRequestHeader, payloads)."""
        header = pb.ForwardRequestHeader()
        payloads = self._common(header)
        return header, payloads

    def forward_request(self):
        header, payloads = self.forward()
        return pb.ForwardRequest(header=header, payload=payloads)

    def backward(self, out, lse, dout, dlse=None, out_dtype=None, dout_dtype=None):
        """(BackwardRequestHeader, payloads). out is sent in the result dtype, dout in `dout_dtype`."""
        header = pb.BackwardRequestHeader()
        payloads = self._common(header)
        tensors = [("out", out, out_dtype or self.result_dtype), ("lse", lse, pb.DTYPE_FP32),
                   ("dout", dout, dout_dtype or self.dtype)]
        if dlse is not None:
            tensors.append(("dlse", dlse, pb.DTYPE_FP32))
        for name, values, dtype in tensors:
            getattr(header, name).CopyFrom(tensor(dtype, values.shape, len(payloads)))
            payloads.append(to_bytes(values, dtype))
        return header, payloads

    def backward_request(self, *args, **kwargs):
        header, payloads = self.backward(*args, **kwargs)
        return pb.BackwardRequest(header=header, payload=payloads)

    def plan_request(self, which=pb.PASS_FORWARD):
        header = pb.BackwardRequestHeader()
        payloads = self._common(header)
        return pb.PlanRequest(header=header, payload=payloads, **{"pass": which})


def simple_case(rng, batch=1, seqlen_q=7, seqlen_k=9, num_heads=2, num_kv_heads=1, head_dim=16,
                head_dim_v=None, dtype=pb.DTYPE_FP32, **options):
    """Gaussian q, k, v in BSHD."""
    def draw(*shape):
        return round_to(rng.standard_normal(shape), dtype)

    return Case(q=draw(batch, seqlen_q, num_heads, head_dim),
                k=draw(batch, seqlen_k, num_kv_heads, head_dim),
                v=draw(batch, seqlen_k, num_kv_heads, head_dim_v or head_dim), dtype=dtype,
                **options)


def _lengths(rng, batch, longest):
    return tuple(int(x) for x in rng.integers(0, longest + 1, batch))


def _cumulative(lengths):
    return (0,) + tuple(int(x) for x in np.cumsum(lengths))


def random_case(rng, max_seqlen=40, head_dims=(1, 8, 20, 33, 64, 72, 128, 264)):
    """Any mixture of layouts, dtypes, options and policies. Every case is valid."""
    dtype = FLOAT_DTYPES[rng.integers(3)]
    kv_heads = int(rng.integers(1, 4))
    heads = kv_heads * int(rng.integers(1, 4))
    batch = int(rng.integers(1, 4))
    head_dim = int(rng.choice(head_dims))
    head_dim_v = head_dim if rng.random() < 0.7 else int(rng.choice(head_dims))
    longest_q, longest_k = (int(x) for x in rng.integers(1, max_seqlen + 1, 2))
    thd = rng.random() < 0.35
    if thd:
        lengths_q, lengths_k = _lengths(rng, batch, longest_q), _lengths(rng, batch, longest_k)
        longest_q, longest_k = max(lengths_q), max(lengths_k)
        lead_q, lead_k = (sum(lengths_q),), (sum(lengths_k),)
    else:
        lead_q, lead_k = (batch, longest_q), (batch, longest_k)

    def draw(*shape):
        return round_to(rng.standard_normal(shape) * rng.choice([1.0, 3.0]), dtype)

    case = Case(q=draw(*lead_q, heads, head_dim), k=draw(*lead_k, kv_heads, head_dim),
                v=draw(*lead_k, kv_heads, head_dim_v), dtype=dtype, thd=thd)
    if thd:
        case.cu_q, case.cu_k = _cumulative(lengths_q), _cumulative(lengths_k)
    _draw_options(rng, case, batch, longest_q, longest_k)
    case.policy = _draw_policy(rng)
    case.report_level = int(rng.integers(0, 3))
    return case


def _draw_options(rng, case, batch, longest_q, longest_k):
    def chance(p):
        return rng.random() < p

    heads = case.num_heads
    if chance(0.2):
        case.scale = float(np.float32(rng.choice([0.05, 0.5, 1.0])))
    case.causal = chance(0.4)
    case.top_left = chance(0.3)
    if chance(0.25):
        case.window_left = int(rng.integers(0, longest_k + 2))
    if chance(0.2):
        case.window_right = 0 if case.causal else int(rng.integers(0, longest_k + 2))
    if not case.thd and chance(0.3):
        case.seqlens_k = _lengths(rng, batch, longest_k)
    if not case.thd and chance(0.2):
        case.seqlens_q = _lengths(rng, batch, longest_q)
    if chance(0.15):
        case.softcap = 5.0
    if chance(0.15):
        shape = (batch, heads) if chance(0.5) else (heads,)
        case.alibi = round_to(rng.random(shape), pb.DTYPE_FP32)
    if chance(0.2):
        case.bias_dtype = FLOAT_DTYPES[rng.integers(3)]
        bias_heads = heads if chance(0.5) else 1
        lead = (bias_heads, case.q.shape[0]) if case.thd else (
            batch if chance(0.5) else 1, bias_heads, longest_q)
        bias = round_to(rng.standard_normal(lead + (longest_k,)), case.bias_dtype)
        bias[rng.random(bias.shape) < 0.1] = -np.inf
        case.bias = bias
    if chance(0.2):
        case.sinks = round_to(rng.standard_normal(heads), pb.DTYPE_FP32)
    if chance(0.2):
        case.dropout = (0.25, int(rng.integers(0, 2 ** 63)), int(rng.integers(0, 2 ** 32)))
    if chance(0.2):
        case.block = (64, 64) if chance(0.7) else (16, 8)
        shape = (batch if chance(0.5) else 1, heads if chance(0.5) else 1,
                 -(-longest_q // case.block[0]), -(-longest_k // case.block[1]))
        case.block_mask = (rng.random(shape) < 0.7).astype(np.uint8)
    case.deterministic = chance(0.2)
    if chance(0.3):
        case.out_dtype = pb.DTYPE_FP32
    if chance(0.3):
        case.strided = tuple(n for n in INPUTS if chance(0.5))


def _draw_policy(rng):
    draw = rng.random()
    if draw < 0.4:
        return None
    if draw < 0.6:
        return pb.PathPolicy(mode=pb.PATH_POLICY_REQUIRE_FLASH)
    if draw < 0.75:
        return pb.PathPolicy(mode=pb.PATH_POLICY_FORCE_STANDARD)
    if draw < 0.85:
        return pb.PathPolicy(mode=pb.PATH_POLICY_AUTO)
    name = str(rng.choice(["flash_cpu", "standard_cpu", "flash_sm90", "standard_cuda"]))
    return pb.PathPolicy(mode=pb.PATH_POLICY_NAMED, path=name)


__all__ = ["Case", "simple_case", "random_case", "FLOAT_DTYPES", "from_bytes", "item_size"]
