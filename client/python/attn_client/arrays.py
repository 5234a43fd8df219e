"""Arrays of NumPy (ml_dtypes and JAX included) and PyTorch, to and from tensors of attention.v1."""

from __future__ import annotations

import math
import sys

import numpy as np

from . import checks, schema

ITEM_BYTES = {schema.DTYPE_FP32: 4, schema.DTYPE_FP16: 2, schema.DTYPE_BF16: 2,
              schema.DTYPE_UINT8: 1}
FLOATS = (schema.DTYPE_FP32, schema.DTYPE_FP16, schema.DTYPE_BF16)
_BY_DTYPE = {np.dtype("<f4"): schema.DTYPE_FP32, np.dtype("<f2"): schema.DTYPE_FP16,
             np.dtype("u1"): schema.DTYPE_UINT8, np.dtype("?"): schema.DTYPE_UINT8}
_BY_NAME = {"float32": schema.DTYPE_FP32, "float16": schema.DTYPE_FP16,
            "bfloat16": schema.DTYPE_BF16, "uint8": schema.DTYPE_UINT8, "bool": schema.DTYPE_UINT8}
_STORED = {schema.DTYPE_FP32: np.dtype("<f4"), schema.DTYPE_FP16: np.dtype("<f2"),
           schema.DTYPE_BF16: np.dtype("<u2"), schema.DTYPE_UINT8: np.dtype("u1")}
_SHORT_NAMES = {"fp32": schema.DTYPE_FP32, "fp16": schema.DTYPE_FP16, "bf16": schema.DTYPE_BF16}


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
        return np.asarray(self.bits.astype(np.uint32) << 16).view(np.float32)

    @property
    def shape(self):
        return self.bits.shape


class Spec:
    """Shape and dtype ("fp32", "fp16", "bf16") of a tensor without contents, for plan()."""

    def __init__(self, shape, dtype: str):
        self.shape = tuple(checks.integers("shape", shape))
        self.dtype = dtype_number("dtype", dtype)


def dtype_number(name: str, value: str) -> int:
    return checks.one_of(name, value, _SHORT_NAMES)


def _is_torch(value) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


class Array:
    """An argument: its shape, the wire's dtype, and how it lies in memory."""

    def __init__(self, name: str, value, allowed):
        self._name, self._value = name, value
        self.swapped = False
        if _is_torch(value):
            self.dtype = _BY_NAME.get(str(value.dtype)[len("torch."):])
        elif isinstance(value, BFloat16):
            self._value, self.dtype = value.bits, schema.DTYPE_BF16
        elif isinstance(value, Spec):
            self.dtype = value.dtype
        elif isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"{name} is a masked array; its mask would not be used")
        else:
            try:
                self._value = np.asarray(value)
            except Exception as error:
                raise TypeError(f"{name} cannot be read as an array: {error}") from None
            dtype = self._value.dtype
            self.dtype = _BY_DTYPE.get(dtype) or _BY_NAME.get(dtype.name)
            if self.dtype == schema.DTYPE_BF16:
                self._value = self._value.view(np.uint16)
        if self.dtype not in allowed:
            names = ", ".join(schema.name_of(schema.DType, dtype).lower() for dtype in allowed)
            given = getattr(value, "dtype", self._value.dtype)
            raise TypeError(f"{name} has dtype {given}; it must be one of {names}")
        self.shape = tuple(self._value.shape)

    @property
    def is_spec(self) -> bool:
        return isinstance(self._value, Spec)

    def swap_axes(self, a: int, b: int):
        """The same with two axes exchanged."""
        self.swapped = True
        shape = list(self.shape)
        shape[a], shape[b] = shape[b], shape[a]
        self.shape = tuple(shape)
        if not self.is_spec:
            self._value = self._value.swapaxes(a, b)

    def strides(self):
        """Strides to send, in elements, where the values lie contiguous but for the order of their
        axes, of which the last one is the fastest; else None, and encode() makes them
        contiguous."""
        if self.is_spec or self._is_contiguous():
            return None
        order = self._memory_order()
        if order is None:
            return None
        strides, step = [0] * len(order), 1
        for axis in reversed(order):
            strides[axis] = step
            step *= self.shape[axis]
        return strides

    def encode(self, strides):
        """(bytes as a memoryview, their address), for strides that strides() gave."""
        values = self._to_numpy().astype(_STORED[self.dtype], copy=False)
        if strides is None:
            values = np.ascontiguousarray(values)
        else:
            values = values.transpose(sorted(range(len(strides)), key=lambda axis: -strides[axis]))
        data = values.reshape(-1).view(np.uint8)
        return memoryview(data), data.__array_interface__["data"][0]

    def _to_numpy(self) -> np.ndarray:
        if not _is_torch(self._value):
            return self._value
        torch = sys.modules["torch"]
        try:
            value = self._value.detach().cpu().resolve_conj().resolve_neg()
            if value.dtype == torch.bfloat16:
                return value.view(torch.int16).numpy().view(np.uint16)
            return value.numpy()
        except (RuntimeError, NotImplementedError) as error:
            raise TypeError(f"{self._name} cannot be read: {error}") from None

    def _is_contiguous(self) -> bool:
        if _is_torch(self._value):
            return self._value.is_contiguous()
        return self._value.flags.c_contiguous

    def _memory_order(self):
        """Axes from slowest to fastest, or None: see strides()."""
        if _is_torch(self._value):
            steps = self._value.stride()
        else:
            size = self._value.itemsize
            if any(step % size for step in self._value.strides):
                return None
            steps = [step // size for step in self._value.strides]
        # Where an axis of extent 1 lies makes no difference: it keeps its place.
        axes = [axis for axis, extent in enumerate(self.shape) if extent > 1]
        order = sorted(axes, key=lambda axis: -steps[axis])
        expected = 1
        for axis in reversed(order):
            if steps[axis] != expected:
                return None
            expected *= self.shape[axis]
        last = len(self.shape) - 1
        if order and order[-1] != last and self.shape[last] > 1:
            return None
        places = iter(order)
        return [next(places) if extent > 1 else axis for axis, extent in enumerate(self.shape)]


class Like:
    """Makes results of the kind that an argument was: NumPy, BFloat16 or PyTorch on its device."""

    def __init__(self, value):
        self._bfloat16 = self._device = None
        if isinstance(value, BFloat16):
            self._bfloat16 = BFloat16
        elif _is_torch(value):
            self._device = value.device
        elif not isinstance(value, Spec):
            dtype = getattr(value, "dtype", None)
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
