"""verl's `DataProto` on this wire, its padding left behind; and through Ray: `install`.

To import this module is enough for `encode` and `decode` to take a DataProto, alone or anywhere
inside other values, over every transport of this library.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any, TypeGuard

import torch
from tensordict import TensorDict

from jagcodec.errors import ArgumentTypeError, WireFormatError
from jagcodec.integrations import ray as through_ray
from jagcodec.integrations._trimmed import Trimmed, restore, trim
from jagcodec.wire.decoder import decode
from jagcodec.wire.encoder import encode
from jagcodec.wire.frames import Frame
from jagcodec.wire.registry import register_type

try:
    from verl.protocol import DataProto
    from verl.utils import metric as metrics
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "jagcodec.integrations.verl needs verl: pip install verl, or, to leave the other packages "
        "of an environment as they are, as docs/verl.md says",
        name=error.name,
    ) from error

if find_spec("PIL") is not None:  # without Pillow there are no images
    from jagcodec.integrations.pillow import register_images

    register_images()

# --- frames --------------------------------------------------------------------------------------


def encode_dataproto(
    data: DataProto, *, narrow: bool = False, checksum: bool = False, allow_pickle: bool = False
) -> list[Frame]:
    """A DataProto as a message: `encode`, for this type alone.

    Args:
        data: `batch` a TensorDict or None, `non_tensor_batch` numpy arrays, `meta_info` anything
            that can ride. None of it is changed.
        narrow: As for `encode`: ids, positions and masks in fewer bytes.
        checksum: As for `encode`.
        allow_pickle: As for `encode`.

    Returns:
        Frames, as `encode` gives them. They alias memory of `data` where it is not trimmed.

    A rectangle of `batch` goes without the run of one value that each of its rows begins with,
    and that which it ends with: left and right padding, found in the rows themselves, bit for bit.
    So no mask is needed, no column has to be named, and no value can be lost. A column in which
    that saves less than an eighth goes as it is; so do jagged columns and everything else.

    Raises:
        ArgumentTypeError: `data` is no DataProto.
        UnsupportedTypeError: Something in it cannot ride; the error has its path.
    """
    if type(data) is not DataProto:
        raise ArgumentTypeError(
            "bad_type",
            "encode_dataproto(data)",
            f"expected a verl.DataProto, found {type(data).__name__}; encode takes other values",
        )
    return encode(data, narrow=narrow, checksum=checksum, allow_pickle=allow_pickle)


def decode_dataproto(
    frames: Any, *, device: torch.device | str | None = None, allow_pickle: bool = False
) -> DataProto:
    """The DataProto that `encode_dataproto` was given.

    Args:
        frames: As for `decode`.
        device: As for `decode`.
        allow_pickle: As for `decode`.

    Returns:
        Rectangles of the same shapes and bits, memory of their own; the columns in their order;
        everything else as `decode` documents it. It may be written to.

    Raises:
        WireFormatError: The message cannot be read, or is not that of a DataProto.
    """
    data = decode(frames, device=device, allow_pickle=allow_pickle)
    if type(data) is not DataProto:
        raise WireFormatError(
            "bad_value",
            "$",
            f"expected the message of a DataProto, found one of {type(data).__name__}; use decode",
        )
    return data


# --- Ray -----------------------------------------------------------------------------------------


def install(*, allow_pickle: bool = False, narrow: bool = False) -> None:
    """Let Ray carry verl's batches by this wire, from now on and out of this process.

    A `DataProto`, a TensorDict, a jagged tensor, alone or anywhere inside task arguments, results
    and what `ray.put` is given: so also what verl's worker groups dispatch and collect. What
    arrives is a copy that may be written to. Call it in the driver before work is dispatched, and
    name it as ``worker_process_setup_hook`` for the workers. Who only reads needs jagcodec
    installed and nothing else. To call it twice is harmless; the last call decides.

    Args:
        allow_pickle: Pickle objects inside batches that cannot ride, instead of refusing them.
        narrow: As for `encode`: fewer bytes for more work, for batches that leave the machine.

    Exactly these classes are meant, not their subclasses.

    Raises:
        UnsupportedTypeError: Not here, but where Ray writes a batch that holds an object which
            cannot ride.

    Example:
        .. code-block:: python

            import ray
            from jagcodec.integrations.verl import install

            install()
            ray.init(runtime_env={
                "worker_process_setup_hook": "jagcodec.integrations.verl.install"
            })
            data = ray.get(ray.put(data))
    """
    through_ray.register(allow_pickle=allow_pickle)
    reducer = partial(
        through_ray.reduced,
        read=_read_with_pickles if allow_pickle else _read,
        allow_pickle=allow_pickle,
        narrow=narrow,
    )
    through_ray.carry(dict.fromkeys((DataProto, *through_ray.VALUES), reducer))


def uninstall() -> None:
    """Let Ray write batches as it did before `install`; what is in its store stays readable.

    This undoes `jagcodec.integrations.ray.register` too.
    """
    through_ray.unregister()


# What objects in the store name: these stay where they are. They are functions of this module so
# that who reads has its types registered.


def _read(frames: list[Any]) -> Any:
    return decode(through_ray.owned(frames))


def _read_with_pickles(frames: list[Any]) -> Any:
    return decode(through_ray.owned(frames), allow_pickle=True)


# --- DataProto <-> what can ride -----------------------------------------------------------------


def _state(data: DataProto) -> dict[str, Any]:
    batch = data.batch
    trimmed = {} if type(batch) is not TensorDict else _trimmed_columns(batch)
    return {
        "batch": batch.exclude(*trimmed) if trimmed else batch,
        "order": list(batch.keys()) if trimmed else None,
        "trimmed": {name: tuple(column) for name, column in trimmed.items()},
        "non_tensor_batch": data.non_tensor_batch,
        "meta_info": data.meta_info,
    }


def _trimmed_columns(batch: TensorDict) -> dict[str, Trimmed]:
    return {
        name: column
        for name, leaf in batch.items()
        if _is_rectangle(leaf)
        and (column := trim(leaf.detach().cpu())).nbytes <= leaf.nbytes * _WORTHWHILE
    }


# Below, memory that goes as it is and is not put together again is worth more than its bytes.
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


def _dataproto(state: Any) -> DataProto:
    batch = state["batch"]
    if state["trimmed"]:
        columns = restore({name: Trimmed(*parts) for name, parts in state["trimmed"].items()})
        order = state["order"]
        if sorted(order) != sorted([*columns, *batch.keys()]):
            raise ValueError(f"expected every column once in the order, found {order}")
        leaves = {name: columns[name] if name in columns else batch.get(name) for name in order}
        names = batch.names if any(batch.names) else None
        batch = TensorDict(leaves, batch_size=batch.batch_size, names=names)
    # Not by its constructor, which would refuse what verl itself sends without a look.
    data: DataProto = object.__new__(DataProto)
    data.batch = batch
    data.non_tensor_batch = state["non_tensor_batch"]
    data.meta_info = state["meta_info"]
    return data


register_type(DataProto, "verl.DataProto", to_state=_state, from_state=_dataproto)


def _metric(state: Any) -> Any:
    metric = object.__new__(metrics.Metric)
    metric.aggregation, metric.values = state
    return metric


if hasattr(metrics, "Metric"):  # from 0.7 on: what the losses put into the metrics of a batch
    register_type(
        metrics.AggregationType,
        "verl.AggregationType",
        to_state=lambda aggregation: aggregation.value,
        from_state=metrics.AggregationType,
    )
    register_type(
        metrics.Metric,
        "verl.Metric",
        to_state=lambda metric: (metric.aggregation, metric.values),
        from_state=_metric,
    )
