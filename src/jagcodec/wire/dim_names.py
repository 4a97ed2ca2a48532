"""Dim names in a schema: a batch in a batch has those of the one around it for the same dims."""

from __future__ import annotations

from typing import Any

from jagcodec.errors import WireFormatError, brief
from jagcodec.wire.spec import Kind

_BATCHES = (Kind.TENSORDICT, Kind.LAZY_STACK)


def check_dim_names(node: Any) -> None:
    """See that no reader has to choose between the names of a node and those of its children.

    Of a value of a user's type, its names are known when it is made.

    Raises:
        WireFormatError: A batch in a TENSORDICT has other names for its dims, or members of a
            LAZY_STACK differ in theirs.
    """
    rank = node.fields[0] if node.kind is Kind.TENSORDICT else None
    own = None if rank is None else _names(node)
    for child in node.children:
        found = _names(child)
        if found is None:
            continue
        if rank is not None:
            found = {dim: name for dim, name in found.items() if dim < rank}
        if own is None:
            own = found
        if found != own:
            raise WireFormatError(
                "bad_record",
                "$",
                f"expected dim names {brief([*own.values()])} in each batch in a {node.kind.name}, "
                f"found {brief([*found.values()])}",
            )


def _names(node: Any) -> dict[int, str] | None:
    """The dims of a batch that have names, and these; None of what is no batch, or not known."""
    if node.kind is Kind.TENSORDICT:
        return {dim: name for dim, name in enumerate(node.fields[1] or ()) if name is not None}
    if node.kind is not Kind.LAZY_STACK:
        return None
    stack_dim, name = node.fields
    known = _names(node.children[0]) if node.children else {}
    if known is None:
        return None
    inner = {dim + (dim >= stack_dim): known[dim] for dim in known}
    return inner if name is None else {**inner, stack_dim: name}
