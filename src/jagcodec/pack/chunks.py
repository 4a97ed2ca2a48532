"""What a producer appends to a row: numbers of any kind, exactly as cells of a dtype."""

from __future__ import annotations

import array
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from jagcodec.errors import ArgumentError, ArgumentTypeError, brief, describe
from jagcodec.memory.tensor_bytes import NUMPY_DTYPES, resolved

Cells = npt.NDArray[Any]


class Chunk(NamedTuple):
    """Numbers that are to become cells.

    Attributes:
        numbers: (n, ...), or () for one number; a tensor if numpy has not its dtype.
        is_scalar: Whether it is one number.
        is_typed: Whether its dtype was somebody's choice, and not that of Python's numbers.
        ints: Which of the numbers were ints, where others were floats.
    """

    numbers: Cells | torch.Tensor
    is_scalar: bool
    is_typed: bool
    ints: npt.NDArray[np.bool_] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it says neither a dtype nor the shape of a token."""
        return not self.is_typed and not self.is_scalar and self.numbers.shape[0] == 0


_ARRAY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    **NUMPY_DTYPES,
    torch.uint16: np.dtype("uint16"),
    torch.uint32: np.dtype("uint32"),
    torch.uint64: np.dtype("uint64"),
    torch.complex64: np.dtype("complex64"),
    torch.complex128: np.dtype("complex128"),
}
_TORCH_DTYPES = {dtype: name for name, dtype in _ARRAY_DTYPES.items()}

# Those that numpy has not, by the words that hold their bits.
_WORDS: dict[torch.dtype, Any] = {
    torch.bfloat16: (np.int16, torch.int16),
    **{
        getattr(torch, name): (np.uint8, torch.uint8)
        for name in dir(torch)
        if name.startswith("float8_") and isinstance(getattr(torch, name), torch.dtype)
    },
}


# --- whatever it is, as numbers ----------------------------------------------------------------


def numbers_of(value: Any, path: str) -> Chunk:
    """A chunk of any kind, as numbers; arrays and tensors are aliased where that can be.

    Raises:
        ArgumentError: Lists within lists differ in length.
        ArgumentTypeError: It is no chunk, or holds something that is no number.
    """
    if isinstance(value, torch.Tensor):
        return _of_tensor(value, path)
    if isinstance(value, array.array):
        return _of_array(value, path)
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind not in "biufc" or value.dtype.newbyteorder("=") not in _TORCH_DTYPES:
            raise _no_numbers(path, f"an array of dtype {value.dtype}")
        return Chunk(np.asarray(value, value.dtype.newbyteorder("=")), value.ndim == 0, True)
    if isinstance(value, (list, tuple, range)):
        return _of_list(list(value), path)
    if type(value) in _NUMBERS:
        return Chunk(_python_numbers([value], path).reshape(()), True, False)
    raise _no_numbers(path, f"a {type(value).__name__}")


_NUMBERS = frozenset((bool, int, float))


def _of_array(value: array.array[Any], path: str) -> Chunk:
    """As a list of these numbers, which takes far longer."""
    numbers = np.asarray(value)
    wide = _AS_IN_LISTS.get(numbers.dtype.kind)
    if wide is None:
        raise _no_numbers(path, f"an array of typecode {value.typecode!r}")
    return Chunk(numbers.astype(wide), False, False)


_AS_IN_LISTS = {"i": np.int64, "u": np.uint64, "f": np.float64}


def _of_tensor(tensor: torch.Tensor, path: str) -> Chunk:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        raise _no_numbers(path, describe(tensor))
    if tensor.dtype not in _ARRAY_DTYPES and tensor.dtype not in _WORDS:
        raise _no_numbers(path, f"a tensor of {tensor.dtype}")
    host = resolved(tensor.detach().cpu())
    numbers = host.numpy() if host.dtype in _ARRAY_DTYPES else host
    return Chunk(numbers, tensor.dim() == 0, True)


def _of_list(items: list[Any], path: str) -> Chunk:
    types = set(map(type, items))
    if not types <= _NUMBERS and any(issubclass(kind, np.generic) for kind in types):
        items = [item.item() if isinstance(item, np.generic) else item for item in items]
        types = set(map(type, items))
    if types <= _NUMBERS:
        ints = None
        if float in types and int in types:
            ints = np.array([type(item) is int for item in items])
        return Chunk(_python_numbers(items, path), False, False, ints)
    if all(issubclass(kind, (torch.Tensor, np.ndarray)) for kind in types):
        parts = [numbers_of(item, f"{path}[{i}]") for i, item in enumerate(items)]
        return _stacked(parts, path)
    if types <= {list, tuple}:
        _check_equal([len(item) for item in items], path)
        inner = _of_list(list(itertools.chain.from_iterable(items)), path)
        shape = len(items), len(items[0]), *inner.numbers.shape[1:]
        ints = None if inner.ints is None else inner.ints.reshape(shape)
        return Chunk(inner.numbers.reshape(shape), False, inner.is_typed, ints)
    i = next(i for i, item in enumerate(items) if type(item) not in _NUMBERS)
    raise _no_numbers(f"{path}[{i}]", brief(items[i]))


def _stacked(parts: Sequence[Chunk], path: str) -> Chunk:
    """One array or tensor per token."""
    first = parts[0].numbers
    for i, part in enumerate(parts):
        found = part.numbers
        if found.shape != first.shape or found.dtype != first.dtype:
            raise ArgumentError(
                "bad_shape",
                f"{path}[{i}]",
                f"expected {first.dtype} of shape {tuple(first.shape)} like the one before, found "
                f"{found.dtype} of shape {tuple(found.shape)}",
            )
    numbers: Any = [part.numbers for part in parts]
    if isinstance(first, np.ndarray):
        return Chunk(np.stack(numbers), False, True)
    return Chunk(torch.stack(numbers), False, True)


def _check_equal(lengths: list[int], path: str) -> None:
    for i, length in enumerate(lengths):
        if length != lengths[0]:
            raise ArgumentError(
                "bad_shape",
                f"{path}[{i}]",
                f"expected {lengths[0]} numbers like in the tokens before, found {length}",
            )


def _python_numbers(items: list[Any], path: str) -> Cells:
    """Python's numbers as booleans, int64, uint64 or float64; none of them rounded."""
    types = set(map(type, items))
    if types == {bool}:
        return np.array(items, dtype=np.bool_)
    if float in types:
        if types != {float}:
            for i, item in enumerate(items):
                if type(item) is int and not (-(1 << 63) <= item < 1 << 63 and float(item) == item):
                    raise _not_held(f"{path}[{i}]", item, torch.float64)
        return np.array(items, dtype=np.float64)
    for dtype in (np.int64, np.uint64):
        try:
            return np.array(items, dtype=dtype)
        except OverflowError:
            continue
    i = next(i for i, item in enumerate(items) if not -(1 << 63) <= item < 1 << 63)
    raise _not_held(f"{path}[{i}]", items[i], torch.int64)


# --- numbers as cells --------------------------------------------------------------------------


def dtype_of(chunk: Chunk, path: str) -> torch.dtype | None:
    """The dtype of a column that begins with a chunk; None if an empty list does not say it."""
    numbers = chunk.numbers
    if isinstance(numbers, torch.Tensor):
        return numbers.dtype
    if chunk.is_typed:
        return _TORCH_DTYPES[numbers.dtype]
    if not numbers.size and not chunk.is_scalar:
        return None
    if numbers.dtype == np.uint64:
        large = numbers.reshape(-1) >> 63
        if large.any():
            number = numbers.reshape(-1)[int(np.argmax(large))].item()
            raise _not_held(path, number, torch.int64)
    return _OF_NUMBERS[numbers.dtype.kind]


_OF_NUMBERS = {"b": torch.bool, "i": torch.int64, "u": torch.int64, "f": torch.float32}


def cells_of(chunk: Chunk, dtype: torch.dtype, path: str) -> Cells:
    """The numbers of a chunk as cells of a dtype: an array of it, or of its bits.

    Raises:
        ArgumentError: A number is not exactly one of the dtype. Fractions are rounded to it.
        ArgumentTypeError: They are of a kind that the dtype has not, such as floats of integers.
    """
    numbers = chunk.numbers
    if isinstance(numbers, torch.Tensor):
        if dtype == numbers.dtype:
            return _bits(numbers, dtype)
        numbers = numbers.to(torch.float32).numpy()
    target = _ARRAY_DTYPES.get(dtype)
    if target is not None and target == numbers.dtype:  # numpy takes None for float64
        return numbers
    if not numbers.size:
        nothing: Cells = as_dtype(numbers, dtype, path, bits=True)
        return nothing
    source, kind = numbers.dtype.kind, _kind(dtype)
    if source in "fc" and _ORDER.index(source) > _ORDER.index(kind):
        raise ArgumentTypeError(
            "bad_dtype",
            path,
            f"expected {dtype} like the column, found {_TORCH_DTYPES[numbers.dtype]}; give the "
            "column another dtype with RowBuilder(dtypes=...)",
        )
    cells: Cells = as_dtype(numbers, dtype, path, bits=True)
    if source in "iu":
        _check_exact(numbers, cells, dtype, path)
    elif chunk.ints is not None:
        _check_exact(numbers[chunk.ints].astype(np.int64), cells[chunk.ints], dtype, path)
    return cells


# What may become what: each kind those behind it. Signed and unsigned integers are one, and
# whether an integer is a boolean its value says.
_ORDER = "biufc"


def _kind(dtype: torch.dtype) -> str:
    target = _ARRAY_DTYPES.get(dtype)
    return "f" if target is None else target.kind


def _check_exact(numbers: Cells, cells: Cells, dtype: torch.dtype, path: str) -> None:
    """Refuse integers that became others."""
    made = tensor_over(np.ascontiguousarray(cells), dtype)
    back = cells if made is None else made.to(torch.float64).numpy()
    kind = back.dtype.kind
    if kind in "biu":
        # Both as wide as can be, and a number below 0 is none beyond 2**63.
        same = (back.astype(np.uint64) == numbers.astype(np.uint64)) & ((back < 0) == (numbers < 0))
    else:
        real = back.real.astype(np.float64)
        # A float that is not finite, or beyond all integers, is none.
        wide, bound = (np.uint64, 2.0**64) if numbers.dtype.kind == "u" else (np.int64, 2.0**63)
        inside = (real < bound) & (real >= -bound)
        whole = np.where(inside, real, 0).astype(wide)
        same = inside & (whole == numbers)
    if same.all():
        return
    number = numbers.reshape(-1)[int(np.argmin(same.reshape(-1)))].item()
    raise _not_held(path, number, dtype)


def as_dtype(
    numbers: Cells, dtype: torch.dtype, path: str = "RowBuilder", *, bits: bool = False
) -> Any:
    """Numbers converted as torch does it: an array; without `bits` a tensor, if numpy has it not.

    Raises:
        ArgumentTypeError: The dtype is not one of numbers that can be appended.
    """
    target = _ARRAY_DTYPES.get(dtype)
    if target is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            cells: Cells = numbers.astype(target)
            return cells
    if dtype not in _WORDS:
        raise ArgumentTypeError(
            "bad_dtype", path, f"expected a dtype of plain numbers, found {dtype}"
        )
    with np.errstate(over="ignore"):
        tensor = torch.from_numpy(np.array(numbers, dtype=np.float64)).to(dtype)
    return _bits(tensor, dtype) if bits else tensor


def tensor_over(cells: Cells, dtype: torch.dtype) -> torch.Tensor | None:
    """The tensor whose bits these are; None of a dtype that numpy has."""
    return None if dtype in _ARRAY_DTYPES else torch.from_numpy(cells).view(dtype)


def _bits(tensor: torch.Tensor, dtype: torch.dtype) -> Cells:
    cells: Cells = tensor.view(_WORDS[dtype][1]).numpy()
    return cells


# --- errors ------------------------------------------------------------------------------------


def _no_numbers(path: str, found: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        "bad_type",
        path,
        f"expected numbers (a list, a tuple, a range, an array or a tensor of them, or one), "
        f"found {found}",
    )


def _not_held(path: str, number: Any, dtype: torch.dtype) -> ArgumentError:
    return ArgumentError(
        "bad_dtype", path, f"expected numbers that {dtype} holds exactly, found {brief(number)}"
    )
