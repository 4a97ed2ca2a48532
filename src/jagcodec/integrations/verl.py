"""verl's `DataProto` as messages without padding, also through Ray.

Once this module is imported, `encode` and `decode` accept a DataProto, alone or anywhere inside
other values, over every transport; and members of any `Enum`, such as verl's `DatasetPadMode`, if
the receiver has imported its module. What arrives has the same shapes, bits and order, and may be
written to. For Ray, call `jagcodec.integrations.setup`, which reads the variable
``JAGCODEC_ENCODE`` (`options_of_environment`).
"""

from __future__ import annotations

import enum
from functools import partial
from importlib.util import find_spec
from typing import Any

from tensordict import TensorDict

from jagcodec._compiling import untraced
from jagcodec.integrations import Reducer, needed
from jagcodec.integrations import ray as through_ray
from jagcodec.integrations._trim import trim_batch, untrim_batch
from jagcodec.wire.registry import accept_loaded_subclasses, register_type

with needed(__name__, "verl, installed as docs/verl.md shows"):
    from verl.protocol import DataProto
    from verl.utils import metric as metrics

if find_spec("PIL") is not None:  # without Pillow no value holds an image
    from jagcodec.integrations.pillow import register_images

    register_images()

# --- Ray -----------------------------------------------------------------------------------------


@untraced
def reducers(**options: Any) -> dict[type, Reducer]:
    """For each type, the function that writes its values."""
    write = partial(through_ray.reduced, _read, options)
    return {**through_ray.reducers(), **dict.fromkeys((*through_ray.VALUES, DataProto), write)}


# Objects in the store refer to this function by name: never rename or move it. It belongs to this
# module so that a process that reads such an object imports it, which registers the types.


def _read(frames: list[list[Any]], allow_pickle: bool) -> Any:
    return through_ray.read(frames, allow_pickle)


# --- DataProto <-> what can be encoded -----------------------------------------------------------


def _state_of_proto(data: DataProto) -> dict[str, Any]:
    trimmed: dict[str, Any] = {"batch": data.batch, "order": None, "trimmed": {}}
    if type(data.batch) is TensorDict:
        trimmed = trim_batch(data.batch)
    return {**trimmed, "non_tensor_batch": data.non_tensor_batch, "meta_info": data.meta_info}


def _dataproto(state: Any) -> DataProto:
    batch = state["batch"]
    if state["trimmed"]:
        batch = untrim_batch(batch, state["order"], state["trimmed"])
    # Do not call the constructor: it would reject batches that verl itself sends unchecked.
    data: DataProto = object.__new__(DataProto)
    data.batch = batch
    data.non_tensor_batch = state["non_tensor_batch"]
    data.meta_info = state["meta_info"]
    return data


# For DatasetPadMode: importing it here would import much more of verl.
accept_loaded_subclasses(enum.Enum)
register_type(DataProto, "verl.DataProto", to_state=_state_of_proto, from_state=_dataproto)


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
