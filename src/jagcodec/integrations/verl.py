"""verl's `DataProto` in this wire format, without its padding, and through Ray with `install`.

Once this module is imported, `encode` and `decode` take a DataProto, alone or anywhere inside other
values, over every transport of this library; and members of any `Enum`, such as verl's
`DatasetPadMode`, if the receiver has imported its module.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Unpack

import torch
from tensordict import TensorDict

from jagcodec.errors import ArgumentTypeError, WireFormatError
from jagcodec.integrations import ray as through_ray
from jagcodec.integrations._reducers import Reducer, carry
from jagcodec.integrations._trim import padded_batch, trimmed_batch
from jagcodec.memory.buffers import MessageLike
from jagcodec.wire.compress import Compress
from jagcodec.wire.decoder import decode
from jagcodec.wire.encoder import EncodeOptions, encode
from jagcodec.wire.frames import Frame
from jagcodec.wire.limits import NO_LIMITS, Limits
from jagcodec.wire.registry import register_type, use_loaded

try:
    from verl.protocol import DataProto
    from verl.utils import metric as metrics
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        "jagcodec.integrations.verl needs verl: pip install verl; docs/verl.md says how to install "
        "it without changing the other packages of an environment",
        name=_error.name,
    ) from _error

if find_spec("PIL") is not None:  # without Pillow no value holds an image
    from jagcodec.integrations.pillow import register_images

    register_images()

# --- frames --------------------------------------------------------------------------------------


def encode_dataproto(data: DataProto, **options: Unpack[EncodeOptions]) -> list[Frame]:
    """Encode a DataProto: the same as `encode`, but for this type only.

    Example:
        See `docs/verl.md`.

    Args:
        data: A DataProto whose `batch` is a TensorDict or None, with numpy arrays in
            `non_tensor_batch` and anything that can be encoded in `meta_info`. It is not changed.
        options: As for `encode`: `narrow`, `elide` and `compress` for fewer bytes,
            `checksum`, `allow_pickle`, `default`, `meta`.

    Returns:
        Frames, as from `encode`. They alias the memory of columns that are not trimmed.

    Raises:
        ArgumentTypeError: `data` is not a DataProto.
        UnsupportedTypeError: Something in it cannot be encoded; the error has its path.

    Each row of a rectangle in `batch` is sent without the run of equal cells that it begins with
    and the one that it ends with. These are its left and right padding, detected from the row's
    own bits, so no mask is needed, no column has to be named, and no value can be lost. A column in
    which this saves less than an eighth is sent unchanged, as are jagged columns and everything
    else.
    """
    if type(data) is not DataProto:
        raise ArgumentTypeError(
            "bad_type",
            "encode_dataproto(data)",
            f"expected a verl.DataProto, found {type(data).__name__}; encode takes other values",
        )
    return encode(data, **options)


def decode_dataproto(
    frames: MessageLike,
    *,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
    limits: Limits | None = None,
) -> DataProto:
    """Decode a DataProto that `encode_dataproto` encoded.

    Example:
        See `docs/verl.md`.

    Args:
        frames: As for `decode`.
        device: As for `decode`.
        allow_pickle: As for `decode`.
        limits: As for `decode`.

    Returns:
        A DataProto with rectangles of the same shapes and bits, which own their memory and may be
        written to, in the same order; everything else as `decode` documents it.

    Raises:
        WireFormatError: The message cannot be read, or does not hold a DataProto.
    """
    data = decode(frames, device=device, allow_pickle=allow_pickle, limits=limits)
    if type(data) is not DataProto:
        raise WireFormatError(
            "bad_value",
            "$",
            f"expected the message of a DataProto, found one of {type(data).__name__}; use decode",
        )
    return data


# --- Ray -----------------------------------------------------------------------------------------


def install(
    *,
    allow_pickle: bool = False,
    narrow: bool = False,
    elide: bool = False,
    compress: Compress = None,
    default: Callable[[Any], Any] | None = None,
) -> None:
    """Make Ray write verl's batches to its object store in this wire format, from this process.

    Example:
        .. code-block:: python

            import ray
            from jagcodec.integrations.verl import install

            install()
            data = ray.get(ray.put(data))

    Args:
        allow_pickle: Pickle objects inside batches that cannot be encoded, instead of raising.
        narrow: As for `encode`: fewer bytes for more work, for batches that leave the machine.
        elide: As for `encode`, likewise.
        compress: As for `encode`: fewer still, for links that are slower than memory.
        default: As for `encode`: what to write in place of an object that cannot be encoded.

    Raises:
        UnsupportedTypeError: Not by this call, but by Ray, when it writes a batch with an object
            that cannot be encoded.

    It applies to every `DataProto`, TensorDict and jagged tensor in what `ray.put`, a task argument
    or a result holds, at any depth, and so to what verl's worker groups dispatch and collect. What
    arrives is a copy that may be written to. It applies to this process alone: for the workers of a
    job, use the hook `jagcodec.integrations.setup`. A process that only reads just needs jagcodec
    installed. Calling it again replaces the options. Subclasses of these classes are left to Ray.
    """
    read = _read_with_pickles if allow_pickle else _read
    options = {"narrow": narrow, "elide": elide, "compress": compress, "default": default}
    carry(_of_types(read, allow_pickle=allow_pickle, **options))


def uninstall() -> None:
    """Undo `install`, and everything else that `jagcodec.integrations.ray.unregister` undoes."""
    through_ray.unregister()


def _of_types(read: Callable[[list[Any]], Any], **options: Any) -> dict[type, Reducer]:
    of_ray = through_ray.reducers(read, **options)
    return {**of_ray, DataProto: of_ray[TensorDict]}


# Objects in the store refer to these functions by name: never rename or move them. They belong to
# this module so that a process that reads such an object imports it, which registers the types.


def _read(frames: list[Any]) -> Any:
    return decode(through_ray.owned(frames), limits=NO_LIMITS)


def _read_with_pickles(frames: list[Any]) -> Any:
    return decode(through_ray.owned(frames), allow_pickle=True, limits=NO_LIMITS)


BY_DEFAULT = _of_types(_read)


# --- DataProto <-> what can be encoded -----------------------------------------------------------


def _state(data: DataProto) -> dict[str, Any]:
    trimmed: dict[str, Any] = {"batch": data.batch, "order": None, "trimmed": {}}
    if type(data.batch) is TensorDict:
        trimmed = trimmed_batch(data.batch)
    return {**trimmed, "non_tensor_batch": data.non_tensor_batch, "meta_info": data.meta_info}


def _dataproto(state: Any) -> DataProto:
    batch = state["batch"]
    if state["trimmed"]:
        batch = padded_batch(batch, state["order"], state["trimmed"])
    # Not by its constructor, which would reject batches that verl itself sends unchecked.
    data: DataProto = object.__new__(DataProto)
    data.batch = batch
    data.non_tensor_batch = state["non_tensor_batch"]
    data.meta_info = state["meta_info"]
    return data


use_loaded(enum.Enum)  # DatasetPadMode, which would import much more of verl
register_type(DataProto, "verl.DataProto", to_state=_state, from_state=_dataproto)


def _metric(state: Any) -> Any:
    metric = object.__new__(metrics.Metric)
    metric.aggregation, metric.values = state
    return metric


if hasattr(metrics, "Metric"):  # since verl 0.7, losses put these into the metrics of a batch
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
