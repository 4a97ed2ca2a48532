"""Batches in a batch: whether any TensorDict could hold them as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import NonTensorStack, TensorDictBase, UnbatchedTensor, is_tensorclass

from jagcodec.ragged.non_tensor import dim_names, is_non_tensor
from jagcodec.wire.checks import fail


def nested_mismatch(key: str, leaf: Any, td: TensorDictBase, names: Sequence[Any]) -> str | None:
    """What keeps a TensorDict from being built around a nested one: other rows, or dim names.

    None where nothing does.
    """
    dims = td.batch_dims
    if isinstance(leaf, UnbatchedTensor):
        return None
    try:
        # Objects take the names of the batch around them.
        own = isinstance(leaf, NonTensorStack) or not is_non_tensor(leaf)
        inner: Any = dim_names(leaf) if own else list(names)
    except ValueError as error:  # the members of a lazy stack have different ones
        inner = error
    else:
        if leaf.batch_size[:dims] == td.batch_size and inner[:dims] == list(names):
            return None
    return (
        f"expected batch size {list(td.batch_size)} and dim names {list(names)} in nested "
        f"{key!r} too, found {list(leaf.batch_size)} and {inner}"
    )


def check_names(leaf: Any, names: Sequence[Any] | None, dims: int) -> None:
    """See that a batch of a user's type has the dim names of the one that it was read in.

    Those of other batches are in the schema, and were checked with it.

    Raises:
        WireFormatError: It has others, which tensordict would change.
    """
    # Objects take the names of the batch around them.
    if (isinstance(leaf, TensorDictBase) or is_tensorclass(leaf)) and not is_non_tensor(leaf):
        expected, found = list(names or [None] * dims), list(leaf.names)[:dims]
        if found != expected:
            raise fail("bad_record", f"expected dim names {expected}, found {found}")
