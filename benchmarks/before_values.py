"""Values that two versions of the library must read alike, and their digests.

Only public functions are called, so that every version since the first can run this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import jagcodec
from jagcodec import JagcodecError
from tests.oracle import described

Made = Callable[[], Any]

LENGTHS: tuple[tuple[int, ...], ...] = (
    (),
    (0,),
    (3,),
    (0, 0),
    (5, 0, 2, 7),
    (4, 4, 4),
    tuple(range(9)),
    tuple(70 * (i % 5) for i in range(15)),  # buffers above and below the size of small ones
)
ENCODINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "narrow": {"narrow": True},
    "checksum": {"checksum": True},
    "both": {"narrow": True, "checksum": True},
}
TOKENS = ("ids", "mask", "flags", "logprobs", "hidden", "half", "wide")
PADS = {"ids": 7, "logprobs": -1.5, "flags": True}


def digests() -> tuple[str, dict[str, str]]:
    """The library, and the digest of every value here, or the error that it ends in, by name."""
    return jagcodec.__file__, {name: outcome(make) for name, make in values()}


def outcome(make: Made) -> str:
    """The digest of a value, or the error that making it ends in."""
    try:
        return hashlib.sha256(repr(described(make())).encode()).hexdigest()
    except JagcodecError as error:
        return f"{type(error).__name__}: {error.reason}"


def values() -> Iterator[tuple[str, Made]]:
    """Names and functions that make values by a trip through the library."""
    for lengths in LENGTHS:
        for encoding in ("plain", "both"):
            what = f"{len(lengths)} rows up to {max(lengths, default=0)}, {encoding}"
            numbers, options = torch.tensor(lengths, dtype=torch.int64), ENCODINGS[encoding]
            for name, make in _of_batch(numbers, options):
                yield f"{what}: {name}", make
    for encoding, options in ENCODINGS.items():
        for name, tree in _trees().items():
            yield f"{name}, {encoding}", _through(tree, options)
    yield from _errors()


def _through(tree: Any, options: Mapping[str, Any]) -> Made:
    return lambda: jagcodec.decode(jagcodec.encode(tree, **options))


def fields(lengths: torch.Tensor) -> dict[str, Any]:
    """Columns of many dtypes and ranks, and object columns; seven of them per-token."""
    generator = torch.Generator().manual_seed(0)
    rows, width = len(lengths), max(lengths.tolist(), default=0) + 2
    shape = (rows, width)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "ids": torch.randint(-(2**40), 2**40, shape, generator=generator),
        "mask": torch.randint(0, 2, shape, dtype=torch.int32, generator=generator),
        "flags": torch.randint(0, 2, shape, generator=generator).bool(),
        "logprobs": floats(*shape),
        "hidden": floats(*shape, 3),
        "half": floats(*shape).bfloat16(),
        "wide": floats(*shape, 2, 2).double(),
        "reward": floats(rows),
        "prompts": lengths // 2,
        "image": floats(rows, 2, 3),
        "level": torch.randint(0, 9, (rows,), dtype=torch.uint8, generator=generator),
        "text": _objects([f"row {i}" for i in range(rows)]),
        "meta": _objects([{"i": i, "parts": [1, 2.5, None, b"x"]} for i in range(rows)]),
    }


def _of_batch(lengths: torch.Tensor, options: Mapping[str, Any]) -> Iterator[tuple[str, Made]]:
    columns = fields(lengths)
    named: dict[str, Any] = {"lengths": lengths, "token_aligned_fields": TOKENS}
    td = jagcodec.pack_jagged_fields(columns, **named)
    sources = {
        "encode_fields": jagcodec.encode_fields(columns, **named, **options),
        "encode": jagcodec.encode(td, **options),
    }
    for source, frames in sources.items():
        received = [bytearray(frame) for frame in frames]

        def decoded(frames: Any = received) -> Any:
            return jagcodec.decode(frames)

        def opened(frames: Any = received) -> Any:
            return jagcodec.open_wire(frames)

        yield f"{source}, decode", decoded
        yield f"{source}, from a blob", _from_blob(frames)
        for reader, read in {"decode": decoded, "open_wire": opened}.items():
            for layout, asked in _layouts().items():
                yield f"{source}, {reader}, {layout}", _materialized(read, asked)
            if len(lengths):
                for operation, rows in _row_operations(read, len(lengths)).items():
                    yield f"{source}, {reader}, {operation}", _materialized(rows, {})


def _from_blob(frames: Any) -> Made:
    return lambda: jagcodec.decode(jagcodec.to_blob(frames))


def _materialized(read: Made, options: Mapping[str, Any]) -> Made:
    def columns() -> dict[str, Any]:
        found = jagcodec.materialize(read(), **options, container=dict)
        packed = {k: v for k, v in found.items() if type(v).__name__ == "PackedColumn"}
        return {**found, **{name: column[:3] for name, column in packed.items()}}  # which moved

    return columns


# What used to be the default.
JAGGED_ALONE: Mapping[str, Any] = {"token_aligned_fields": ()}


def _layouts() -> dict[str, dict[str, Any]]:
    return {
        "padded": {},
        "left": {"padding_side": "left", "pad_value_dict": PADS, **JAGGED_ALONE},
        "wide": {"pad_to_seqlen": 300, "attention_mask_of": "ids", **JAGGED_ALONE},
        "multiple": {"pad_to_multiple": 8, "pad_value_dict": PADS, **JAGGED_ALONE},
        "left and right": {
            "padding_side": "left_right",
            "prompt_lengths": "prompts",
            **JAGGED_ALONE,
        },
        "jagged": {"layout": "jagged"},
        "packed": {"layout": "packed"},
        "one stays jagged": {"keep_jagged": ("hidden",)},
    }


def _row_operations(read: Made, rows: int) -> dict[str, Made]:
    index = [rows - 1, 0, rows // 2]
    return {
        "select_rows": lambda: jagcodec.select_rows(read(), index),
        "concat_rows": lambda: jagcodec.concat_rows([read(), read()]),
        "repeat_rows": lambda: jagcodec.repeat_rows(read(), 2),
        "split_rows": lambda: jagcodec.split_rows(read(), sizes=[1, rows - 1])[-1],
    }


def _trees() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    inner = TensorDict({"a": torch.arange(6).view(3, 2)}, batch_size=[3])
    jagged = torch.nested.nested_tensor(
        [torch.randn(n, generator=generator) for n in (2, 0, 5)], layout=torch.jagged
    )
    payloads = {
        "one": NonTensorData({"k": 1}, batch_size=[3]),
        "each": NonTensorStack("a", "b", "c"),
        "x": torch.ones(3),
    }
    types = ("i1", "u2", ">i4", "f2", "f8", "c8", "M8[s]")
    return {
        "scalars": [
            None,
            True,
            -1,
            2**63,
            1.5,
            float("inf"),
            1j,
            "é",
            b"\0",
            range(3),
            slice(1, 2),
        ],
        "containers": {"set": {1, 2}, "frozen": frozenset("a"), "tuple": (1, (2,)), 3: []},
        "arrays": [np.arange(5).astype(dtype) for dtype in types],
        "strings": [np.array(["a", "bcd"]), np.array([b"a", b"bc"])],
        "numpy scalars": [np.int16(4), np.float64(0.1), np.bool_(True)],
        "tensors": [
            torch.zeros(3, 4, dtype=torch.int16).t(),
            torch.zeros((), dtype=torch.float16),
            torch.zeros(2, 0, 3),
            torch.arange(4).to(torch.float8_e4m3fn),
            torch.eye(3).to_sparse(),
        ],
        "torch types": [torch.float32, torch.device("cpu"), torch.Size((2, 3))],
        "jagged": [jagged, jagged * 2],
        "nested TensorDict": TensorDict({"in": inner, "j": jagged}, batch_size=[3]),
        "non-tensors": TensorDict(payloads, batch_size=[3]),
        "views of one tensor": list(torch.arange(4000).view(40, 100).unbind()),
        "large": [torch.arange(100_000), np.arange(70_000.0)],
    }


def _errors() -> Iterator[tuple[str, Made]]:
    columns: dict[str, Any] = {"ids": torch.ones(2, 3)}

    def encoded(*lengths: int) -> Any:
        numbers = torch.tensor(lengths)
        return jagcodec.encode_fields(columns, lengths=numbers, token_aligned_fields=["ids"])

    frames = encoded(2, 3)
    yield "error: a length below 0", lambda: jagcodec.decode(encoded(-1, 2))
    yield "a length past the width", lambda: jagcodec.decode(encoded(2, 4))
    yield "error: an object that cannot be encoded", lambda: jagcodec.encode(object())
    wide = "error: a row past the width asked"
    yield wide, lambda: jagcodec.materialize(jagcodec.open_wire(frames), pad_to_seqlen=2)
    yield "error: a frame too few", lambda: jagcodec.decode(frames[:-1])
    yield "error: no message", lambda: jagcodec.decode([b"nothing"])


def _objects(items: list[Any]) -> Any:
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array
