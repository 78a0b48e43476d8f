"""The python version of CIFAR is pickle, which can run code: read it so that it cannot.

Those files (pickled by Python 2) hold dicts, lists, ints, byte strings and one array of bytes. The three numpy names
that such an array needs are answered by stand-ins of our own, which only collect what they are given; any other
name is refused, so nothing from outside this file is ever called.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np

from recnets.errors import RecNetsError


class _NdArray:
    """Answers for `numpy.ndarray`: keeps the state that an array's pickle sets."""

    array: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        # (version, shape, dtype, Fortran order?, bytes)
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _DType) or not isinstance(data, bytes) or not isinstance(shape, tuple):
            raise pickle.UnpicklingError("an array's state is not what these files hold")
        if any(type(n) is not int or n < 0 for n in shape) or math.prod(shape) != len(data):
            raise pickle.UnpicklingError(f"an array of shape {shape} has {len(data)} bytes")
        self.array = np.frombuffer(data, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


class _DType:
    """Answers for `numpy.dtype`; only unsigned bytes."""

    def __init__(self, name: Any, *_: Any) -> None:
        if name != b"u1":
            raise pickle.UnpicklingError(f"an array of type {name!r}, expected unsigned bytes")

    def __setstate__(self, state: Any) -> None:
        pass


def _reconstruct(kind: Any, *_: Any) -> _NdArray:
    """Answers for `numpy.core.multiarray._reconstruct`."""
    if kind is not _NdArray:
        raise pickle.UnpicklingError("an array of an unknown class")
    return _NdArray()


_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _NdArray,
    ("numpy", "dtype"): _DType,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file holds") from None

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it has a persistent id, which no CIFAR file holds")


def load_cifar_pickle(content: bytes, where: str) -> dict[Any, Any]:
    """The dict in `content`, with bytes for Python 2's strings and uint8 arrays; `where` is for the error."""
    try:
        value = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle may fail in any way
        raise RecNetsError(f"{where} is not a CIFAR file, refused: {error or type(error).__name__}") from error
    if type(value) is not dict:
        raise RecNetsError(f"{where} holds {type(value).__name__}, expected a dict: not a CIFAR file")
    return {key: item.array if isinstance(item, _NdArray) else item for key, item in value.items()}
