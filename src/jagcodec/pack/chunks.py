"""What a producer appends to a row: numbers of any kind, exactly as cells of a dtype."""

from __future__ import annotations

import array
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from jagcodec.errors import ArgumentError, ArgumentTypeError, brief, describe
from jagcodec.memory.tensor_bytes import NUMPY_DTYPES, resolved
from jagcodec.pack.numbers import CODES, DEFAULTS, filled, misfits, option_of, refusal

Cells = npt.NDArray[Any]


class Chunk(NamedTuple):
    """Numbers that are to become cells.

    Attributes:
        numbers: An array, a tensor if numpy has not its dtype, or a flat list of Python's numbers.
        shape: (n, ...), or () for one number.
        is_typed: Whether its dtype was somebody's choice, and not that of Python's numbers.
    """

    numbers: Cells | torch.Tensor | list[Any]
    shape: tuple[int, ...]
    is_typed: bool

    @property
    def is_scalar(self) -> bool:
        """Whether it is one number."""
        return not self.shape

    @property
    def is_empty(self) -> bool:
        """Whether it says neither a dtype nor the shape of a token."""
        return not self.is_typed and self.shape[:1] == (0,)


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
        return Chunk(np.asarray(value, value.dtype.newbyteorder("=")), value.shape, True)
    if isinstance(value, (list, tuple, range)):
        return _of_list(list(value), path)
    if type(value) in _NUMBERS:
        return Chunk([value], (), False)
    raise _no_numbers(path, f"a {type(value).__name__}")


_NUMBERS = frozenset((bool, int, float))


def _of_array(value: array.array[Any], path: str) -> Chunk:
    """As a list of these numbers, which takes far longer."""
    numbers = np.asarray(value)
    wide = _AS_IN_LISTS.get(numbers.dtype.kind)
    if wide is None:
        raise _no_numbers(path, f"an array of typecode {value.typecode!r}")
    return Chunk(numbers.astype(wide), numbers.shape, False)


_AS_IN_LISTS = {"i": np.int64, "u": np.uint64, "f": np.float64}


def _of_tensor(tensor: torch.Tensor, path: str) -> Chunk:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        raise _no_numbers(path, describe(tensor))
    if tensor.dtype not in _ARRAY_DTYPES and tensor.dtype not in _WORDS:
        raise _no_numbers(path, f"a tensor of {tensor.dtype}")
    host = resolved(tensor.detach().cpu())
    numbers = host.numpy() if host.dtype in _ARRAY_DTYPES else host
    return Chunk(numbers, tuple(tensor.shape), True)


def _of_list(items: list[Any], path: str) -> Chunk:
    types = set(map(type, items))
    if not types <= _NUMBERS and any(issubclass(kind, np.generic) for kind in types):
        items = [item.item() if isinstance(item, np.generic) else item for item in items]
        types = set(map(type, items))
    if types <= _NUMBERS:
        return Chunk(items, (len(items),), False)
    if all(issubclass(kind, (torch.Tensor, np.ndarray)) for kind in types):
        parts = [numbers_of(item, f"{path}[{i}]") for i, item in enumerate(items)]
        return _stacked(parts, path)
    if types <= {list, tuple}:
        _check_equal([len(item) for item in items], path)
        inner = _of_list(list(itertools.chain.from_iterable(items)), path)
        return inner._replace(shape=(len(items), len(items[0]), *inner.shape[1:]))
    i = next(i for i, item in enumerate(items) if type(item) not in _NUMBERS)
    raise _no_numbers(f"{path}[{i}]", brief(items[i]))


def _stacked(parts: Sequence[Chunk], path: str) -> Chunk:
    """One array or tensor per token."""
    first: Any = parts[0].numbers
    numbers: list[Any] = [part.numbers for part in parts]
    for i, found in enumerate(numbers):
        if found.shape != first.shape or found.dtype != first.dtype:
            raise ArgumentError(
                "bad_shape",
                f"{path}[{i}]",
                f"expected {first.dtype} of shape {tuple(first.shape)} like the one before, found "
                f"{found.dtype} of shape {tuple(found.shape)}",
            )
    stacked = np.stack(numbers) if isinstance(first, np.ndarray) else torch.stack(numbers)
    return Chunk(stacked, tuple(stacked.shape), True)


def _check_equal(lengths: list[int], path: str) -> None:
    for i, length in enumerate(lengths):
        if length != lengths[0]:
            raise ArgumentError(
                "bad_shape",
                f"{path}[{i}]",
                f"expected {lengths[0]} numbers like in the tokens before, found {length}",
            )


# --- numbers as cells --------------------------------------------------------------------------


def dtype_of(chunk: Chunk) -> torch.dtype | None:
    """The dtype of a column that begins with a chunk; None if an empty list does not say it."""
    numbers = chunk.numbers
    if isinstance(numbers, list):
        kinds = set(map(type, numbers))
        return next((DEFAULTS[kind] for kind in (float, int, bool) if kind in kinds), None)
    if isinstance(numbers, torch.Tensor):
        return numbers.dtype
    if chunk.is_typed:
        return _TORCH_DTYPES[numbers.dtype]
    return None if chunk.is_empty else DEFAULTS[float if numbers.dtype.kind == "f" else int]


def cells_of(chunk: Chunk, dtype: torch.dtype, path: str, name: str) -> Cells:
    """The numbers of a chunk as cells of a dtype: an array of it, or of its bits.

    Raises:
        ArgumentError: A number is not exactly one of the dtype. Fractions are rounded to it.
        ArgumentTypeError: They are of a kind that the dtype has not, such as floats of integers.
    """
    numbers = chunk.numbers
    if isinstance(numbers, list):
        return _of_python(numbers, dtype, path, name).reshape(chunk.shape)
    if isinstance(numbers, torch.Tensor):
        if dtype == numbers.dtype:
            return _bits(numbers, dtype)
        numbers = numbers.to(torch.float32).numpy()
    target = _ARRAY_DTYPES.get(dtype)
    if target is not None and target == numbers.dtype:  # numpy takes None for float64
        return numbers
    source, kind = numbers.dtype.kind, _kind(dtype)
    if numbers.size and source in "fc" and _ORDER.index(source) > _ORDER.index(kind):
        raise ArgumentTypeError(
            "bad_dtype",
            path,
            f"expected {dtype} like the column, found {_TORCH_DTYPES[numbers.dtype]}; give the "
            "column another dtype with RowBuilder(dtypes=...)",
        )
    if source in "iu":
        wrong = misfits(torch.from_numpy(np.array(numbers)), dtype)
        if wrong.any():
            number = numbers.reshape(-1)[int(np.argmax(wrong.reshape(-1)))].item()
            raise refusal(path, number, dtype, partial(option_of, name))
    cells: Cells = as_dtype(numbers, dtype, path, bits=True)
    return cells


def _of_python(items: list[Any], dtype: torch.dtype, path: str, name: str) -> Cells:
    """Python's numbers as cells: False and True are 0 and 1, too large fractions infinite."""
    if dtype in CODES:
        cells, bad = filled([items], (len(items),), dtype)
        if bad is None:
            return _bits(cells, dtype) if isinstance(cells, torch.Tensor) else cells
        item = items[bad[1]]
        if dtype == torch.bool:
            for item in items:
                if type(item) is float or item not in (0, 1):
                    raise refusal(path, item, dtype, partial(option_of, name))
            return np.array(items, dtype=np.bool_)
        if type(item) is bool:
            return _of_python([+item for item in items], dtype, path, name)
        if type(item) is int or not dtype.is_floating_point:
            raise refusal(path, item, dtype, partial(option_of, name))
    items = [+item for item in items]  # False and True as ints
    wide, bad = filled([items], (len(items),), torch.float64)
    if bad is not None:
        raise refusal(path, items[bad[1]], dtype, partial(option_of, name))
    narrow: Cells = as_dtype(wide, dtype, path, bits=True)
    made = tensor_over(narrow, dtype)
    back: Cells = narrow if made is None else made.to(torch.float64).numpy()
    for item, same in zip(items, (back == wide).tolist(), strict=True):
        if type(item) is int and not same:
            raise refusal(path, item, dtype, partial(option_of, name))
    return narrow


# What may become what: each kind those behind it. Signed and unsigned integers are one, and
# whether an integer is a boolean its value says.
_ORDER = "biufc"


def _kind(dtype: torch.dtype) -> str:
    target = _ARRAY_DTYPES.get(dtype)
    return "f" if target is None else target.kind


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
    cells: Cells = (tensor.view(_WORDS[dtype][1]) if dtype in _WORDS else tensor).numpy()
    return cells


# --- errors ------------------------------------------------------------------------------------


def _no_numbers(path: str, found: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        "bad_type",
        path,
        f"expected numbers (a list, a tuple, a range, an array or a tensor of them, or one), "
        f"found {found}",
    )
