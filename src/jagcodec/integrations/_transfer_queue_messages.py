"""Messages between clients and storage units of TransferQueue: options, and bodies of requests.

`StorageOptions` makes and opens messages, and `storage_options` reads them from a configuration.
An option that the configuration leaves out comes from the environment variable ``JAGCODEC_ENCODE``,
which `options_of_environment` in `jagcodec.integrations` reads. `body_of` and `content_of` put a
message into the body of a request or a reply, and take it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from jagcodec._arguments import check_options
from jagcodec._version import __version__
from jagcodec.columns.batch import Columns, Storage
from jagcodec.errors import (
    ArgumentTypeError,
    TransportError,
    UnsupportedTypeError,
    WireFormatError,
    brief,
)
from jagcodec.integrations import options_of_environment
from jagcodec.rows.row_splits import Chosen
from jagcodec.wire.limits import DEFAULT_LIMITS, Limits
from jagcodec.wire.read.wire_batch import WireBatch, open_wire
from jagcodec.wire.write.encoder import encode
from jagcodec.wire.write.parts import parts_to_send

NAME = "SimpleStorage"  # `transfer_queue.close` and the metrics compare with it
MESSAGE = f"jagcodec {__version__}"  # the key of a message in the body of a request
# The key in `meta` of a reply for the names of columns that are lists with tensors in them.
# TransferQueue's own code nests those.
WITH_TENSORS = "with_tensors"


@dataclass(frozen=True)
class StorageOptions:
    """The configuration under ``backend.SimpleStorage.jagcodec``, as for `encode` and `decode`."""

    allow_pickle: bool = False
    elide: bool = False
    narrow: bool = False
    limits: Limits = DEFAULT_LIMITS

    def encode(self, columns: Columns) -> list[Any]:
        """The message of columns in memory."""
        return self._encode(columns, narrow=self.narrow, elide=self.elide)

    def encode_again(
        self, columns: Columns, how: Storage, meta: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """The message of columns that came in other messages, stored `how` those stored them."""
        narrow = self.narrow or [path for path in how.narrow if path[0] in columns.columns] or False
        return self._encode(columns, narrow=narrow, elide=how.elided, meta=meta)

    def _encode(self, columns: Columns, **options: Any) -> list[Any]:
        with self._remedy():
            frames: list[Any] = encode(columns, allow_pickle=self.allow_pickle, **options)
        return frames

    @contextmanager
    def _remedy(self) -> Iterator[None]:
        """Name the option in errors about values that cannot be encoded."""
        try:
            yield
        except UnsupportedTypeError as error:
            detail = f"{error.detail}; or set backend.{NAME}.jagcodec.allow_pickle to true"
            raise UnsupportedTypeError(error.reason, error.path, detail) from error

    def parts(self, columns: Columns, groups: Sequence[Chosen]) -> list[Columns]:
        """The columns of each group of rows, for a message each."""
        with self._remedy():
            return parts_to_send(
                columns, groups, narrow=self.narrow, allow_pickle=self.allow_pickle
            )

    def open(self, frames: Any, limits: Limits | None = None) -> WireBatch:
        return open_wire(frames, allow_pickle=self.allow_pickle, limits=limits or self.limits)

    def open_sent(self, body: Any, rows: int, where: str) -> WireBatch:
        """The message that a peer sent, which must have so many rows."""
        frames = content_of(body, where)
        if type(frames) is not list:  # if it is a string, `open_wire` would read a file
            detail = f"expected the frames of a message, found {brief(frames)}"
            raise WireFormatError("foreign", where, detail)
        try:
            batch = self.open(frames)
        except WireFormatError as error:
            raise WireFormatError(error.reason, f"{where}: {error.path}", error.detail) from error
        if batch.batch_size != (rows,):
            sizes = " x ".join(map(str, batch.batch_size))
            raise WireFormatError("bad_rows", where, f"expected {rows} rows, found {sizes}")
        return batch


_OPTIONS = {"allow_pickle": bool, "elide": bool, "narrow": bool, "limits": Mapping}


def storage_options(config: Mapping[str, Any]) -> StorageOptions:
    """The options of a configuration; `JAGCODEC_ENCODE` decides those that it leaves out."""
    where, options = f"backend.{NAME}.jagcodec", config.get("jagcodec")
    _check_type(options, Mapping, where)
    options = {} if options is None else options
    check_options(options, _OPTIONS, where)
    for name, value in options.items():
        _check_type(value, _OPTIONS[name], f"{where}.{name}")
    limits = options.get("limits") or {}
    check_options(limits, [field.name for field in fields(Limits)], f"{where}.limits")
    every_option = {**options_of_environment(), **options, "limits": Limits(**limits)}
    return StorageOptions(**every_option)


def _check_type(value: Any, kind: Any, path: str) -> None:
    if not isinstance(value, kind) and not (value is None and kind is Mapping):
        expected = "true or false" if kind is bool else "a mapping of options"
        raise ArgumentTypeError("bad_type", path, f"expected {expected}, found {brief(value)}")


def body_of(frames: Sequence[Any]) -> dict[str, Any]:
    """A message as TransferQueue's encoder sends it: each buffer as a frame, without a copy."""
    header, *buffers = frames
    return {MESSAGE: [bytes(header), *(np.frombuffer(buffer, np.uint8) for buffer in buffers)]}


def content_of(body: Any, where: str) -> Any:
    """What a peer sent under `MESSAGE`; an error if it uses another version or another backend."""
    names = list(body) if isinstance(body, Mapping) else []
    if names == [MESSAGE]:
        return body[MESSAGE]
    raise other_backend(names, where)


def other_backend(names: Sequence[Any], where: str) -> TransportError:
    """The error for a peer that sent these `names` in place of `MESSAGE`, or does not know it."""
    versions = [name for name in names if str(name).startswith("jagcodec ")]
    sender = versions[0] if versions else "TransferQueue's own format"
    detail = f"expected a message of {MESSAGE}, found {sender}; install this version everywhere, "
    detail += "and import jagcodec.integrations.transfer_queue before transfer_queue.init"
    return TransportError("peer_failed", where, detail)
