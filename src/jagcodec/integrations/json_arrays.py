"""Arrays of replies in JSON: envelopes in base64 as arrays, and expert ids in few bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from jagcodec._arguments import check_array, mapping_of, require_int
from jagcodec._compiling import untraced
from jagcodec.errors import ArgumentError, ArgumentTypeError, brief, describe
from jagcodec.integrations._engine_arrays import (
    MAX_BYTES,
    decoded_base64,
    dtype_named,
    shaped_array,
    smallest_of,
    usable_expert_ids,
)

__all__ = ["array_of_envelope", "smallest_ids"]


@untraced
def array_of_envelope(envelope: Any, *, max_bytes: int = MAX_BYTES) -> npt.NDArray[Any]:
    """The array of a dict of `data` in base64, `shape` and `dtype`.

    Example:
        >>> from jagcodec.integrations.json_arrays import array_of_envelope
        >>> array_of_envelope({"data": "AQACAAMABAA=", "shape": [2, 2], "dtype": "int16"})
        array([[1, 2],
               [3, 4]], dtype=int16)

    Args:
        envelope: What `json.loads` returned. Other keys, such as `start`, are not read. A dtype is
            "bool", "int8" to "int64", "uint8" to "uint64", or "float16" to "float64", also
            as numpy writes it, such as "<i2".
        max_bytes: The most bytes that the array may have.

    Returns:
        A read-only array over the memory of the decoded bytes. Nothing else holds that memory.

    Raises:
        ArgumentError: A key is missing, `data` is not base64, cut or larger than `max_bytes`, or
            its bytes are not as many as the shape and the dtype say.
        ArgumentTypeError: This is not a dict.
    """
    path = "array_of_envelope(envelope)"
    max_bytes = require_int(max_bytes, 0, "array_of_envelope(max_bytes)")
    parts = mapping_of(envelope, path, "a dict of data, shape and dtype")
    missing = [name for name in ("data", "shape", "dtype") if name not in parts]
    if missing:
        detail = f"expected a dict of data, shape and dtype, found one without {missing[0]!r}"
        raise ArgumentError("no_such_field", path, detail)
    shape = parts["shape"]
    if not isinstance(shape, (list, tuple)):
        detail = f"expected a list of sizes, found {brief(shape)}"
        raise ArgumentError("bad_shape", f"{path}.shape", detail)
    dtype = dtype_named(parts["dtype"], f"{path}.dtype")
    data = decoded_base64(parts["data"], max_bytes, f"{path}.data")
    return shaped_array(data, dtype, shape, f"{path}.data")


@untraced
def smallest_ids(
    ids: npt.NDArray[Any], *, experts: int | None = None, pad: int | None = None
) -> npt.NDArray[Any]:
    """Expert ids in the smallest dtype that holds all of them, and the pad.

    Example:
        >>> import numpy as np
        >>> from jagcodec.integrations.json_arrays import smallest_ids
        >>> ids = np.array([[[3, 127], [0, 64]]], dtype=np.int32)
        >>> smallest_ids(ids, experts=256).dtype
        dtype('uint8')
        >>> smallest_ids(ids, experts=256, pad=-1).dtype
        dtype('int16')

    Args:
        ids: An array of integers of any shape.
        experts: How many experts the model has. Pass it: then all rows have one dtype. None: the
            dtype depends on the ids of this array, and rows of two dtypes do not join.
        pad: The id that you will pass in `pad_value_dict`, which is not one of an expert. None if
            you pad with ids of experts, such as ``torch.arange(top_k)``.

    Returns:
        The array, as uint8, int8, int16, int32 or int64: the first that holds all ids. These are
        also dtypes of torch that can be indexed and compared. It is the array itself if it has
        this dtype, and a copy otherwise.

    Raises:
        ArgumentError: An id is neither below `experts` nor the pad, the pad is the id of an expert,
            or there is a pad without `experts`.
        ArgumentTypeError: This is not an array of integers.
    """
    path = "smallest_ids(ids)"
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu":
        kind = ids.dtype if isinstance(ids, np.ndarray) else describe(ids)
        raise ArgumentTypeError("bad_type", path, f"expected an array of integers, found {kind}")
    check_array(ids, path)
    expert_ids = usable_expert_ids(experts, pad, "smallest_ids")
    if expert_ids is None:
        return smallest_of(ids, int(ids.min(initial=0)), int(ids.max(initial=0)))
    return expert_ids.in_smallest(ids, path)
