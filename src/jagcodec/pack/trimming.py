"""Padding off a whole batch, found in its rows, and back on: neither lengths nor masks needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from tensordict import TensorDict, TensorDictBase

from jagcodec._arguments import check_fields
from jagcodec.errors import ArgumentTypeError, WireFormatError
from jagcodec.pack.trimmed import Trimmed, restore, trim


def trim_padding(batch: Mapping[str, Any] | TensorDict) -> dict[str, Any]:
    """A batch without the run of equal cells that each row begins and ends with.

    Example:
        >>> import torch
        >>> from jagcodec import decode, encode, restore_padding, trim_padding
        >>> ids = torch.zeros(64, 512, dtype=torch.int64)
        >>> ids[:, 500:] = torch.arange(12)
        >>> frames = encode(trim_padding({"ids": ids, "reward": torch.ones(64)}))
        >>> sum(memoryview(frame).nbytes for frame in frames) < ids.nbytes / 20
        True
        >>> torch.equal(restore_padding(decode(frames))["ids"], ids)
        True

    Args:
        batch: A dict of names to columns, or a TensorDict. It is not changed. Its rectangles
            (N, S, ...) of 4 KiB and more are trimmed along their widest dim but the first, if
            that saves an eighth or more. Everything else is kept as it is: jagged columns,
            objects, and what lies in nested batches.

    Returns:
        A dict to be encoded, and to be given to `restore_padding` on the other side. What was
        trimmed owns its memory, on the CPU; everything else is aliased.

    Raises:
        ArgumentTypeError: `batch` is neither of these.

    Padding is read from the bits of each row, so no mask and no name is needed, it may be on both
    sides, differ by row, and no value is lost: -0.0 is not 0.0, and a NaN equals itself. Gradients
    are not kept. Where lengths or a mask are known, `pack_jagged_fields` and `pack_masked_fields`
    also make rows of the columns, which other processes can choose from and read in part.
    """
    if not isinstance(batch, TensorDict):
        if isinstance(batch, TensorDictBase):
            raise ArgumentTypeError(
                "bad_type",
                "trim_padding(batch)",
                f"expected a dict of columns or a TensorDict, found {type(batch).__name__}",
            )
        check_fields(batch, "trim_padding(batch)")
    trimmed = trimmed_columns(batch)
    rest: Any = {name: column for name, column in batch.items() if name not in trimmed}
    if isinstance(batch, TensorDict):
        rest = batch.exclude(*trimmed) if trimmed else batch
    return {
        "batch": rest,
        "order": list(batch.keys()),
        "trimmed": {name: tuple(column) for name, column in trimmed.items()},
    }


def restore_padding(trimmed: Any) -> Any:
    """The batch that `trim_padding` was given, bit for bit.

    Example:
        >>> import torch
        >>> from jagcodec import restore_padding, trim_padding
        >>> restore_padding(trim_padding({"a": torch.ones(2, 3)}))
        {'a': tensor([[1., 1., 1.],
                [1., 1., 1.]])}

    Args:
        trimmed: What `trim_padding` returned, as `decode` gives it.

    Returns:
        A dict or a TensorDict, as it was, with its columns in their order. Those that were
        trimmed lie in one allocation, which is freed with the last of them.

    Raises:
        WireFormatError: It is not what `trim_padding` returns.
        MemoryError: The rectangles do not fit in memory. They may be far larger than the message:
            read only messages of peers that you trust with your memory.
    """
    try:
        return padded_batch(trimmed["batch"], trimmed["order"], trimmed["trimmed"])
    except MemoryError:
        raise
    except Exception as error:  # whatever a stranger's parts raise
        raise WireFormatError(
            "bad_value",
            "$",
            f"expected what trim_padding returns, found {type(trimmed).__name__}: {error!s:.200}",
        ) from error


def trimmed_columns(batch: Mapping[str, Any] | TensorDict) -> dict[str, Trimmed]:
    """The columns of a batch of which trimming saves enough, trimmed."""
    return {
        name: column
        for name, leaf in batch.items()
        if _is_rectangle(leaf)
        and (column := trim(leaf.detach().cpu())).nbytes <= leaf.nbytes * _WORTHWHILE
    }


# Where trimming saves less than this, sending the column unchanged, without having to rebuild it,
# is worth more than the bytes saved.
_WORTHWHILE = 7 / 8
_SMALL = 4096


def _is_rectangle(leaf: Any) -> TypeGuard[torch.Tensor]:
    return (
        type(leaf) is torch.Tensor
        and leaf.layout is torch.strided
        and not (leaf.is_nested or leaf.is_quantized or leaf.is_meta)
        and leaf.dim() > 1
        and leaf.nbytes >= _SMALL
    )


def padded_batch(batch: Any, order: list[str], trimmed: Mapping[str, Any]) -> Any:
    """A batch with the columns that were trimmed back among its own, in this order.

    Raises:
        ValueError: The parts do not fit together.
    """
    if not isinstance(batch, (dict, TensorDict)):
        raise ValueError(f"expected a dict or a TensorDict, found {type(batch).__name__}")
    if sorted(order) != sorted([*trimmed, *batch.keys()]):
        raise ValueError(f"expected every column once in the order, found {order!s:.200}")
    if not trimmed:
        return batch
    columns = restore({name: Trimmed(*parts) for name, parts in trimmed.items()})
    leaves = {name: columns[name] if name in columns else batch.get(name) for name in order}
    if isinstance(batch, dict):
        return leaves
    names = batch.names if any(batch.names) else None
    return TensorDict(leaves, batch_size=batch.batch_size, names=names, device=batch.device)
