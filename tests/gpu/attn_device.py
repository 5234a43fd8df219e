"""The CUDA paths over torch tensors: a binding of libattn_device.so (device_api.h)."""

import ctypes
import os

import torch

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

_I32, _I64, _U32, _U64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64
_PTR, _FLOAT, _DOUBLE = ctypes.c_void_p, ctypes.c_float, ctypes.c_double


class _Call(ctypes.Structure):
    _fields_ = [
        ("path", ctypes.c_char_p),
        ("backward", _I32), ("packed", _I32), ("dtype", _I32), ("out_dtype", _I32),
        ("causal", _I32), ("top_left", _I32), ("deterministic", _I32),
        ("softcap", _FLOAT), ("dropout_p", _FLOAT), ("dropout_offset", _U32),
        ("dropout_seed", _U64),
        ("batch", _I64), ("seqlen_q", _I64), ("seqlen_k", _I64),
        ("num_heads", _I64), ("num_kv_heads", _I64), ("head_dim", _I64), ("head_dim_v", _I64),
        ("softmax_scale", _DOUBLE), ("window_left", _I64), ("window_right", _I64),
        ("cu_seqlens_q", _PTR), ("cu_seqlens_k", _PTR), ("block_mask", _PTR),
        ("mask_batch", _I64), ("mask_heads", _I64), ("block_q", _I64), ("block_k", _I64),
    ]


class _Plan(ctypes.Structure):
    _fields_ = [
        ("kernel_id", ctypes.c_char * 128), ("workspace_bytes", _I64),
        ("tile_loaded_bytes", _U64), ("tile_stored_bytes", _U64),
        ("compulsory_bytes", _U64), ("standard_bytes", _U64), ("flops", _U64),
        ("tile_q", _I64), ("tile_k", _I64),
    ]


class _Tensors(ctypes.Structure):
    _fields_ = [(name, _PTR) for name in
                ("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv", "block_mask")]


class _Roofline(ctypes.Structure):
    _fields_ = [(name, _DOUBLE) for name in
                ("copy_bytes", "read_bytes", "matrix_flops", "upload_bytes", "download_bytes")]


class Refused(RuntimeError):
    """The library declines the call; the text holds every reason."""


def _pointer(tensor):
    return None if tensor is None else tensor.data_ptr()


class Library:
    """libattn_device.so. `path`: of the file; default: $ATTN_DEVICE_LIBRARY."""

    def __init__(self, path=None):
        self._lib = ctypes.CDLL(path or os.environ["ATTN_DEVICE_LIBRARY"])
        self._lib.AttnDevicePrepare.restype = _PTR
        self._lib.AttnDevicePrepare.argtypes = [_PTR, _PTR, _I64]
        self._lib.AttnDeviceDescribe.argtypes = [_PTR, _PTR]
        self._lib.AttnDeviceDescribe.restype = None
        self._lib.AttnDeviceRun.argtypes = [_PTR, _PTR, _PTR, _PTR, _PTR, _I64]
        self._lib.AttnDeviceDestroy.argtypes = [_PTR]
        self._lib.AttnDeviceDestroy.restype = None
        self._lib.AttnDeviceMeasureRoofline.argtypes = [_PTR, _PTR, _I64]

    def roofline(self):
        roof, error = _Roofline(), ctypes.create_string_buffer(4096)
        if self._lib.AttnDeviceMeasureRoofline(ctypes.byref(roof), error, len(error)):
            raise RuntimeError(error.value.decode())
        return {name: getattr(roof, name) for name, _ in _Roofline._fields_}

    def plan(self, path, backward, shape, **options):
        """A planned call. `shape`: dict of batch, seqlen_q, seqlen_k, num_heads, num_kv_heads,
        head_dim, head_dim_v, dtype. Options as in device_api.h; `block_mask`: uint8 tensor
        [batch|1, heads|1, rows, cols] in host memory; cu_seqlens: lists. Raises Refused."""
        return Call(self._lib, path, backward, shape, options)


class Call:
    """A planned call with its workspace; run() enqueues it on torch's current stream."""

    def __init__(self, lib, path, backward, shape, options):
        self._lib, self._handle = lib, None
        options = dict(options)
        self._kept = []  # host memory that the call points to while it is planned
        call = _Call(path=path.encode(), backward=int(backward), out_dtype=-1, window_left=-1,
                     window_right=-1)
        for name, value in shape.items():
            setattr(call, name, DTYPES[value] if name == "dtype" else value)
        mask = options.pop("block_mask", None)
        if mask is not None:
            mask = mask.to(torch.uint8).contiguous()
            self._kept.append(mask)
            call.block_mask, call.mask_batch, call.mask_heads = mask.data_ptr(), *mask.shape[:2]
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            if name in options:
                values = options.pop(name)
                array = (_I64 * len(values))(*values)
                self._kept.append(array)
                setattr(call, name, ctypes.addressof(array))
                call.packed = 1
        for name, value in options.items():
            if name not in dict(_Call._fields_):
                raise TypeError(f"no option {name}")
            setattr(call, name, value)
        self._error = ctypes.create_string_buffer(4096)
        self._handle = lib.AttnDevicePrepare(ctypes.byref(call), self._error, len(self._error))
        if not self._handle:
            raise Refused(self._error.value.decode())
        plan = _Plan()
        lib.AttnDeviceDescribe(self._handle, ctypes.byref(plan))
        self.plan = {name: getattr(plan, name) for name, _ in _Plan._fields_}
        self.plan["kernel_id"] = plan.kernel_id.decode()
        self.plan["tile_bytes"] = plan.tile_loaded_bytes + plan.tile_stored_bytes
        self._workspace = None
        self._tensors = None

    def bind(self, **tensors):
        """Sets the tensors (device memory, contiguous as the call says) and the workspace."""
        for name, tensor in tensors.items():
            if tensor is not None and tensor.data_ptr() % 16:
                raise ValueError(f"{name} is not aligned to 16 bytes")
        self._tensors = _Tensors(**{name: _pointer(t) for name, t in tensors.items()})
        self._kept = list(tensors.values())
        if self._workspace is None:
            # torch aligns to 512 bytes.
            self._workspace = torch.empty(max(1, self.plan["workspace_bytes"]),
                                          dtype=torch.uint8, device="cuda")
        return self

    def run(self):
        stream = torch.cuda.current_stream().cuda_stream
        if self._lib.AttnDeviceRun(self._handle, ctypes.byref(self._tensors),
                                   self._workspace.data_ptr(), stream, self._error,
                                   len(self._error)):
            raise RuntimeError(self._error.value.decode())

    def __del__(self):
        if self._handle:
            self._lib.AttnDeviceDestroy(self._handle)


class Attention:
    """One attention on our path: tensors are contiguous [batch, seqlen, heads, head_dim], or, with
    cu_seqlens_q and cu_seqlens_k among the options, [tokens, heads, head_dim]."""

    def __init__(self, lib, path, q, k, v, dout=None, mask=None, **options):
        seqlen_q, heads, dim = q.shape[-3:]
        packed = q.dim() == 3
        batch = len(options["cu_seqlens_q"]) - 1 if packed else q.shape[0]
        shape = dict(batch=batch, seqlen_q=seqlen_q, seqlen_k=k.shape[-3], num_heads=heads,
                     num_kv_heads=k.shape[-2], head_dim=dim, head_dim_v=v.shape[-1], dtype=q.dtype)
        options = {name: value for name, value in options.items()
                   if value is not None and value is not False}
        if mask is not None:
            options.update(block_mask=mask.cpu())
        self.out = torch.empty(*q.shape[:-1], v.shape[-1], device="cuda", dtype=q.dtype)
        self.lse = torch.empty(*(() if packed else (batch,)), heads, seqlen_q, device="cuda",
                               dtype=torch.float32)
        common = dict(q=q, k=k, v=v, out=self.out, lse=self.lse, block_mask=mask)
        self.fwd = lib.plan(path, False, shape, **options).bind(**common)
        self.forward = self.fwd.run
        self.bwd = None
        if dout is not None:
            self.grads = [torch.empty_like(t) for t in (q, k, v)]
            dq, dk, dv = self.grads
            self.bwd = lib.plan(path, True, shape, **options).bind(**common, dout=dout, dq=dq,
                                                                   dk=dk, dv=dv)
            self.backward = self.bwd.run
