"""Pickles of others that hold arrays, read without running anything that may be in them.

A pickle is a program: it may name any function of any module, and call it. Here it finds no function at all but those
that make `_Dtype` and `_Array`, which note what they are given; arrays are made of these notes when all is read.
"""

import mmap
import pickle
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 10_000  # of the program; four arrays take about a hundred
NUMBERS = re.compile(r"b1|[iu][1248]|f[248]")  # NumPy's names of truth values, integers and floats


def read_arrays(path: Path) -> list[np.ndarray]:
    """Return the arrays that a pickle holds as a list or tuple; read-only, of truth values, integers or floats.

    Pickles of any protocol are read, of Python 2 as well, and of any NumPy. Nothing in the file is run or imported, and
    no more memory is used than about three times its length.

    Raises:
        ValueError: naming the file: it holds anything else, names a function that makes no array, or is broken.
        OSError: it cannot be opened.
    """
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                _look_through(content)
                content.seek(0)
                held = _Notes(content, encoding="latin1").load()
            if not isinstance(held, list | tuple) or not all(isinstance(item, _Array) for item in held):
                raise _Refused(f"it holds {_kind(held)}")
            return [item.array() for item in held]
        except Exception as error:  # a damaged pickle can raise nearly anything
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise ValueError(
                f"{path} is no pickle of NumPy arrays alone: {reason}. Nothing in it was run. Expected a list of "
                "arrays of numbers. Fetch it again, from where it was published."
            ) from None


class _Refused(Exception):
    """There is something in the file that makes no array."""


def _look_through(content: Any) -> None:
    """Raise unless the program is short, whole, and asks for no memory that the file does not fill."""
    argument: Any  # of any type, as the operation has it
    for step, (operation, argument, _) in enumerate(pickletools.genops(content)):
        if step == STEPS:
            raise _Refused(f"it takes more than {STEPS:,} steps, and holds something other than a few arrays")
        if operation.name.startswith("EXT"):
            raise _Refused(f"it names a function by the number {argument}")
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= argument < STEPS:
            raise _Refused(f"it asks for {argument:,} places of memory")


class _Notes(pickle.Unpickler):
    """Runs a pickle that can name nothing but what follows."""

    def find_class(self, module: str, name: str, /) -> "_Callable":
        """Return what stands in for a function of NumPy."""
        known = _KNOWN.get((module.replace("numpy._core", "numpy.core", 1), name))
        if known is None:
            raise _Refused(f"it names {f'{module}.{name}'[:80]!r}, which makes no array")
        return known


@dataclass(frozen=True, slots=True)
class _Callable:
    """A function as a pickle sees it: it can be called, and nothing of it can be changed."""

    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise _Refused("it changes a function")


@dataclass(slots=True)
class _Dtype:
    """What a pickle says about a type of numbers."""

    name: str
    order: str = "="

    @classmethod
    def of(cls, name: Any, *_: Any) -> "_Dtype":
        if not (isinstance(name, str) and NUMBERS.fullmatch(name)):
            raise _Refused(f"it has numbers of the type {str(name)[:20]!r}" if isinstance(name, str) else "odd numbers")
        return cls(name)

    def __setstate__(self, state: Any) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        if not (isinstance(order, str) and order in ("<", ">", "|", "=")):
            raise _Refused("it has numbers of an odd type")
        self.order = order

    def dtype(self) -> np.dtype:
        return np.dtype(self.order + self.name)


@dataclass(slots=True)
class _Array:
    """What a pickle says about an array."""

    shape: Any = ()
    numbers: Any = None
    order: Any = "C"
    content: Any = None

    @classmethod
    def empty(cls, *_: Any) -> "_Array":
        return cls()

    @classmethod
    def of_buffer(cls, content: Any, numbers: Any, shape: Any, order: Any) -> "_Array":
        return cls(shape, numbers, order, content)

    @classmethod
    def of_scalar(cls, numbers: Any, content: Any) -> "_Array":
        return cls((), numbers, "C", content)

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise _Refused("it has an array without a shape, a type and numbers")
        _, self.shape, self.numbers, fortran, self.content = state
        self.order = "F" if fortran else "C"

    def array(self) -> np.ndarray:
        content = self.content.encode("latin1") if isinstance(self.content, str) else self.content
        if not isinstance(self.numbers, _Dtype) or not isinstance(content, bytes | bytearray):
            raise _Refused("it has an array without numbers")
        if not isinstance(self.shape, tuple) or not all(type(side) is int and side >= 0 for side in self.shape):
            raise _Refused("it has an array without a shape")
        dtype = self.numbers.dtype()
        if prod(self.shape) * dtype.itemsize != len(content):
            raise _Refused(f"it has an array of shape {self.shape} and type {dtype}, but {len(content):,} bytes for it")
        return np.frombuffer(content, dtype).reshape(self.shape, order="F" if self.order == "F" else "C")


def _encoded(text: Any, encoding: Any) -> bytes:
    """Return bytes that a pickle of an old protocol holds as text."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise _Refused("it encodes text")
    return text.encode("latin1")


def _kind(held: Any) -> str:
    if isinstance(held, list | tuple):
        odd = next(item for item in held if not isinstance(item, _Array))
        return f"a {type(held).__name__} with a {type(odd).__name__.strip('_').lower()} in it"
    return f"one {type(held).__name__.strip('_').lower()}"


_KNOWN = {
    ("numpy", "ndarray"): _Callable(_Array.empty),
    ("numpy", "dtype"): _Callable(_Dtype.of),
    ("numpy.core.multiarray", "_reconstruct"): _Callable(_Array.empty),
    ("numpy.core.multiarray", "scalar"): _Callable(_Array.of_scalar),
    ("numpy.core.numeric", "_frombuffer"): _Callable(_Array.of_buffer),
    ("_codecs", "encode"): _Callable(_encoded),
    ("__builtin__", "bytes"): _Callable(lambda: b""),
}
"""What the pickles of arrays name; NumPy 2 calls ``numpy.core`` ``numpy._core``."""
