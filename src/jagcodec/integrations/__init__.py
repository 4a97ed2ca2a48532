"""Integrations: one module each, imported by name; and the hook for Ray's workers.

Importing this package imports none of these modules and none of their dependencies.
"""

from __future__ import annotations

from jagcodec.integrations import _reducers

__all__ = ["setup"]


def setup() -> None:
    """Make Ray write batches in this wire format, in this process.

    Example:
        .. code-block:: python

            import ray
            from jagcodec.integrations import setup

            setup()  # in this process; the hook calls it in every worker
            ray.init(runtime_env={"worker_process_setup_hook": "jagcodec.integrations.setup"})

    Raises:
        ArgumentError: Not by this call, but by Ray, when it writes a batch of a version of
            tensordict or verl that this wire format does not support.
        ModuleNotFoundError: Ray is not installed.

    Every TensorDict, jagged tensor, `BatchedDataDict`, `WireBatch` and `DataProto` of verl that
    `ray.put`, a task argument or a result holds, at any depth, is written as a message, with the
    options of `jagcodec.integrations.ray.register` if you called it. Types for which you gave Ray a
    serializer keep it. Calling this twice is harmless; `jagcodec.integrations.ray.unregister`
    undoes it. It imports Ray, but not torch, tensordict or verl.
    """
    _reducers.carry()
