"""Arrays of NumPy (ml_dtypes and JAX included) and PyTorch, to and from tensors of attention.v1."""

from __future__ import annotations

import math
import sys

import numpy as np

from . import schema

ITEM_BYTES = {schema.DTYPE_FP32: 4, schema.DTYPE_FP16: 2, schema.DTYPE_BF16: 2,
              schema.DTYPE_UINT8: 1}
_BY_DTYPE = {np.dtype("<f4"): schema.DTYPE_FP32, np.dtype("<f2"): schema.DTYPE_FP16,
             np.dtype("u1"): schema.DTYPE_UINT8, np.dtype("?"): schema.DTYPE_UINT8}
_STORED = {schema.DTYPE_FP32: np.dtype("<f4"), schema.DTYPE_FP16: np.dtype("<f2"),
           schema.DTYPE_BF16: np.dtype("<u2"), schema.DTYPE_UINT8: np.dtype("u1")}
FLOATS = (schema.DTYPE_FP32, schema.DTYPE_FP16, schema.DTYPE_BF16)


class BFloat16:
    """bfloat16 numbers where there is neither ml_dtypes nor PyTorch: the upper halves of float32.

    bits: uint16 array. Calls that get one return one.
    """

    def __init__(self, bits):
        self.bits = np.asarray(bits)
        if self.bits.dtype != np.uint16:
            raise TypeError(f"BFloat16.bits must be uint16, not {self.bits.dtype}")

    @classmethod
    def from_float32(cls, values) -> BFloat16:
        """Rounds to nearest, ties to even."""
        values = np.asarray(values, np.float32)
        bits = values.view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return cls(np.where(np.isnan(values), np.uint16(0x7FC0), rounded))

    def to_float32(self) -> np.ndarray:
        return (self.bits.astype(np.uint32) << 16).view(np.float32)

    @property
    def shape(self):
        return self.bits.shape


class Spec:
    """Shape and dtype ("fp32", "fp16", "bf16") of a tensor without contents, for plan()."""

    def __init__(self, shape, dtype: str):
        self.shape = tuple(int(extent) for extent in shape)
        self.dtype = dtype_number(dtype)


def dtype_number(name: str) -> int:
    known = {"fp32": schema.DTYPE_FP32, "fp16": schema.DTYPE_FP16, "bf16": schema.DTYPE_BF16}
    if name not in known:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(known)}")
    return known[name]


def _is_torch(value) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


class Array:
    """One argument as NumPy sees it: `values` (bf16: uint16) and the wire's dtype."""

    def __init__(self, name: str, value, allowed):
        self.name = name
        if isinstance(value, Spec):
            self.values, self.dtype, self.shape = None, value.dtype, value.shape
        else:
            self.values, self.dtype = _to_numpy(value)
            self.shape = self.values.shape
        if self.dtype not in allowed:
            given = getattr(value, "dtype", None) or self.values.dtype
            names = ", ".join(schema.DType.Name(dtype)[len("DTYPE_"):].lower() for dtype in allowed)
            raise TypeError(f"{name} has dtype {given}; it must be one of {names}")

    def swap_axes(self, a: int, b: int):
        """A view with two axes exchanged."""
        shape = list(self.shape)
        shape[a], shape[b] = shape[b], shape[a]
        self.shape = tuple(shape)
        if self.values is not None:
            self.values = self.values.swapaxes(a, b)

    def encode(self, may_be_strided: bool):
        """(bytes as a memoryview, their address, strides in elements or None: contiguous)."""
        values = self.values.astype(_STORED[self.dtype], copy=False)
        strides = None
        if not values.flags.c_contiguous:
            order = _memory_order(values) if may_be_strided else None
            if order is None:
                values = np.ascontiguousarray(values)
            else:
                strides = [stride // values.itemsize for stride in values.strides]
                values = values.transpose(order)
        data = values.reshape(-1).view(np.uint8)
        return memoryview(data), data.__array_interface__["data"][0], strides


def _to_numpy(value):
    """(array, bfloat16 as uint16; the wire's dtype, or None: it has none)."""
    if isinstance(value, BFloat16):
        return value.bits, schema.DTYPE_BF16
    if _is_torch(value):
        torch = sys.modules["torch"]
        value = value.detach()
        if value.device.type != "cpu":
            value = value.cpu()
        if value.dtype == torch.bfloat16:
            return value.view(torch.int16).numpy().view(np.uint16), schema.DTYPE_BF16
        value = value.numpy()
    array = np.asarray(value)
    dtype = _BY_DTYPE.get(array.dtype)
    if dtype is None:
        if array.dtype.name == "bfloat16":
            return array.view(np.uint16), schema.DTYPE_BF16
        dtype = _BY_DTYPE.get(array.dtype.newbyteorder("<"))
    return array, dtype


def _memory_order(values: np.ndarray):
    """Axes from slowest to fastest where `values` is a contiguous array with axes exchanged and its
    last axis the fastest; else None."""
    order = sorted(range(values.ndim), key=lambda axis: (-values.strides[axis], axis))
    if values.size == 0 or order[-1] != values.ndim - 1:
        return None
    return order if values.transpose(order).flags.c_contiguous else None


class Like:
    """Makes results of the kind that an argument was: NumPy, BFloat16 or PyTorch on its device."""

    def __init__(self, value):
        self._bfloat16 = self._device = None
        if isinstance(value, BFloat16):
            self._bfloat16 = BFloat16
        elif _is_torch(value):
            self._device = value.device
        elif not isinstance(value, Spec):
            dtype = np.asarray(value).dtype
            self._bfloat16 = lambda bits: bits.view(dtype)

    def make(self, dtype: int, shape, data, swapped: bool):
        """From bytes that are then its own. swapped: with axes 1 and 2 exchanged, as a view."""
        values = np.frombuffer(data, _STORED[dtype], math.prod(shape)).reshape(shape)
        if swapped:
            values = values.swapaxes(1, 2)
        if self._device is None:
            return self._bfloat16(values) if dtype == schema.DTYPE_BF16 else values
        torch = sys.modules["torch"]
        if dtype == schema.DTYPE_BF16:
            tensor = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(values)
        return tensor.to(self._device)
