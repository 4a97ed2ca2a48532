"""Batches in Mooncake's distributed store: `Store`, over a client that the caller has set up.

A value is one blob under one key. It is packed directly into memory registered with the transfer
engine, and is read either as a whole or only in the ranges that hold the chosen columns and rows.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, TypeAlias, Unpack

import numpy as np
import torch

from jagcodec.errors import (
    ArgumentError,
    ArgumentKeyError,
    ArgumentTypeError,
    JagcodecError,
    Reason,
    TransportError,
    TransportTimeoutError,
)
from jagcodec.memory.tensor_bytes import ByteArray, address, borrowed
from jagcodec.pack.fields import encode_fields
from jagcodec.ragged.row_splits import Lengths
from jagcodec.wire.decoder import decode
from jagcodec.wire.encoder import EncodeOptions, encode
from jagcodec.wire.frames import blob_size, finished, write_blob
from jagcodec.wire.limits import Limits
from jagcodec.wire.spec import ALIGNMENT
from jagcodec.wire.wire_batch import WireBatch, open_wire

try:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig
except ModuleNotFoundError as _missing:
    raise ModuleNotFoundError(
        "jagcodec.integrations.mooncake needs Mooncake: pip install 'jagcodec[mooncake]', or a "
        "mooncake-transfer-engine for your accelerator",
        name=_missing.name,
    ) from _missing
except ImportError as _missing:
    raise ImportError(
        f"jagcodec.integrations.mooncake needs the system libraries of Mooncake: {_missing}; on "
        "Debian: apt-get install libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4"
    ) from _missing

__all__ = ["Store"]

Allocate: TypeAlias = Callable[[int], ByteArray]
"""Takes a number of bytes, returns that much writable memory."""


class Store:
    """Batches under keys of a Mooncake store.

    Example:
        .. code-block:: python

            from mooncake.store import MooncakeDistributedStore
            from jagcodec import materialize, open_wire
            from jagcodec.integrations.mooncake import Store

            client = MooncakeDistributedStore()
            if client.setup(host, metadata, 1 << 30, 1 << 26, "tcp", "", master):
                raise ConnectionError(f"no Mooncake master at {master}")
            with Store(client) as store:
                store.put_fields("step_1", columns, lengths=lengths)
                batch = materialize(open_wire(store.read("step_1")))
                ids = store.open("step_1").select(["input_ids"]).rows(slice(0, 64))

    Args:
        client: A `MooncakeDistributedStore` after a `setup` that returned 0. It still belongs to
            the caller: close this store first, then the client. Several stores may share one
            client.
        max_bytes: The most memory to register. Buffers are kept for the next call.

    Raises:
        ArgumentTypeError: `client` is not a MooncakeDistributedStore.
        ArgumentError: `max_bytes` is not positive.
        TransportError: The client is not set up, or is closed.

    What the methods return owns its memory, except that `read` lends registered memory for as
    long as anything refers to it. Every call ends: if a master or a node does not answer, Mooncake
    gives up after 30 seconds (its MC_RPC_TIMEOUT_MS and MC_TCP_STATUS_TIMEOUT_SEC). Threads may
    share a store.
    """

    def __init__(self, client: MooncakeDistributedStore, *, max_bytes: int = 1 << 32) -> None:
        if not isinstance(client, MooncakeDistributedStore):
            raise ArgumentTypeError(
                "bad_type",
                "Store(client)",
                f"expected a MooncakeDistributedStore, found {type(client).__name__}",
            )
        if max_bytes < 1:
            raise ArgumentError(
                "bad_option", "Store(max_bytes)", f"expected a positive number, found {max_bytes}"
            )
        self._client = client
        self._memory = _Registered(client, max_bytes)
        self._check("Store(client)")

    def put(
        self,
        key: str,
        obj: Any,
        *,
        replace: bool = False,
        config: ReplicateConfig | None = None,
        **options: Unpack[EncodeOptions],
    ) -> int:
        """Put a value: its tensors are copied once, into registered memory, and sent from there.

        Example:
            See `Store`.

        Args:
            key: A non-empty string.
            obj: Anything that `encode` takes: a TensorDict, a `BatchedDataDict`, a dict, ...; or
                a `WireBatch`, of which only the chosen rows and columns are put.
            replace: Replace the value under this key, if there is one. Mooncake overwrites it in
                place, so a concurrent reader may get a mixture of both values, which
                ``checksum=True`` turns into an error in `get` and `decode`. It is better to give
                each step its own key.
            config: Where replicas go, and whether they may be evicted. Mooncake's default is one
                replica on any node, evicted when the store is full.
            options: Those of `encode`; a
                `WireBatch` takes no options.

        Returns:
            The number of bytes put.

        Raises:
            ArgumentError: The key is taken, `key` is empty, or the value needs more than
                `max_bytes`. (If two clients put the same key at the same moment, Mooncake keeps
                one value and reports success to both.)
            ArgumentTypeError: `key` is not a string.
            TransportError: The store is full, the master does not answer, or the transfer failed.
            UnsupportedTypeError: As `encode`; nothing was put.
        """
        where = f"Store.put({key!r})"

        def write(allocate: Allocate) -> int:
            if isinstance(obj, WireBatch):
                message = finished(obj.to_frames(), where)
                return write_blob(message, allocate(blob_size(message)))
            return encode(obj, out=allocate, **options)

        if options and isinstance(obj, WireBatch):
            raise ArgumentError(
                "bad_option",
                where,
                "expected no options for a WireBatch, which is already encoded, found "
                f"{', '.join(options)}; put its to_tensordict()",
            )

        return self._put(key, write, replace, config, where)

    def put_fields(
        self,
        key: str,
        fields: Mapping[str, Any],
        *,
        lengths: Lengths | None,
        token_aligned_fields: Iterable[str] | None = None,
        replace: bool = False,
        config: ReplicateConfig | None = None,
        **options: Unpack[EncodeOptions],
    ) -> int:
        """Put padded columns: `encode_fields` with its rows written directly to registered memory.

        Example:
            See `Store`.

        Args:
            key: As for `put`.
            fields: As for `encode_fields`.
            lengths: As for `encode_fields`.
            token_aligned_fields: As for `encode_fields`.
            replace: As for `put`.
            config: As for `put`.
            options: Those of `encode`: `narrow`, `elide`, `checksum` and so on.

        Returns:
            The number of bytes put.

        Raises:
            ArgumentError: As `encode_fields` and `put`.
            ArgumentTypeError: As `encode_fields` and `put`.
            TransportError: As `put`.
            UnsupportedTypeError: As `encode`; nothing was put.
        """
        where = f"Store.put_fields({key!r})"

        def write(allocate: Allocate) -> int:
            return encode_fields(
                fields,
                lengths=lengths,
                token_aligned_fields=token_aligned_fields,
                out=allocate,
                **options,
            )

        return self._put(key, write, replace, config, where)

    def get(
        self,
        key: str,
        *,
        device: torch.device | str | None = None,
        allow_pickle: bool = False,
        limits: Limits | None = None,
    ) -> Any:
        """Read the value under a key into memory of the caller's own.

        Example:
            See `docs/mooncake.md`.

        Args:
            key: The key it was put under.
            device: As for `decode`.
            allow_pickle: As for `decode`.
            limits: As for `decode`. What the store holds is read before they are looked at;
                `max_bytes` bounds that.

        Returns:
            As `decode`, in one new block of memory, which the value's tensors keep alive.

        Raises:
            ArgumentKeyError: There is no such key: it was never put, was removed, or was evicted.
            ArgumentError: The value needs more than `max_bytes`.
            TransportError: The value is being written, or the transfer failed.
            WireFormatError: As `decode`: what is stored is foreign, truncated or damaged.
        """
        lent = self._read(key, f"Store.get({key!r})")
        return decode(lent.copy(), device=device, allow_pickle=allow_pickle, limits=limits)

    def read(self, key: str) -> memoryview:
        """Read the blob under a key into registered memory, for `decode` and `open_wire`.

        Example:
            See `Store`.

        Args:
            key: The key it was put under.

        Returns:
            The blob. Its memory is lent: it counts towards `max_bytes` until nothing refers to it
            any more, including tensors that `decode` made over it. After `close` it stays valid
            as ordinary memory.

        Raises:
            ArgumentKeyError: As `get`.
            ArgumentError: As `get`.
            TransportError: As `get`.

        ``materialize(open_wire(store.read(key)))`` copies every token once, from this memory to
        its rectangle; columns that were never packed alias this memory.
        """
        return self._read(key, f"Store.read({key!r})").data

    def open(
        self,
        key: str,
        *,
        device: torch.device | str | None = None,
        allow_pickle: bool = False,
        read_ahead: int = 1 << 18,
        limits: Limits | None = None,
    ) -> WireBatch:
        """Open the batch under a key, to read only chosen columns and rows of it.

        Example:
            See `Store`.

        Args:
            key: The key it was put under. Do not put another value under it while the batch is
                in use.
            device: As for `open_wire`.
            allow_pickle: As for `open_wire`.
            read_ahead: The smallest number of bytes to read at once, so that one read fetches the
                whole header, and one read fetches rows that are close together. A good value is
                what the network transfers in about one round trip.
            limits: As for `open_wire`.

        Returns:
            A `WireBatch`. A contiguous range of rows of a column takes one read. What it returns
            owns its memory; ``materialize`` pads directly from the bytes that were read.
            Checksums are not verified.

        Raises:
            ArgumentKeyError: There is no such key; also later, if it has been removed since.
            ArgumentError: As `get`; or `read_ahead` is negative.
            TransportError: As `get`, here and on every later read.
            WireFormatError: As `open_wire`; also later, if a field is malformed or truncated.
        """
        where = f"Store.open({key!r})"
        if read_ahead < 0:
            raise ArgumentError(
                "bad_option", f"{where}(read_ahead)", f"expected 0 or more, found {read_ahead}"
            )
        source = _Ranges(self, key, self._size(key, where), read_ahead)
        return open_wire(source, device=device, allow_pickle=allow_pickle, limits=limits)

    def remove(self, key: str, *, force: bool = False) -> None:
        """Remove a key and its value.

        Example:
            See `docs/mooncake.md`.

        Args:
            key: The key it was put under.
            force: Remove it even if it is leased: Mooncake's master leases a value to its readers
                for 10 seconds after a read (`--default_kv_lease_ttl`).

        Raises:
            ArgumentKeyError: There is no such key.
            TransportError: The value is leased or being written, or the master does not answer.
        """
        where = f"Store.remove({key!r})"
        self._check(where)
        _checked(self._client.remove(_key(key, where), force), where)

    def close(self) -> None:
        """Release the registered memory; what `read` lent stays valid, and the client open."""
        self._memory.close(alive=self._client.health_check() != _NOT_SET_UP)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_memory"):
            self.close()

    # Transfers

    def _check(self, where: str) -> None:
        """Raise where Mooncake itself would end in a segmentation fault."""
        if self._memory.closed:
            raise TransportError("no_peer", where, "expected an open store, found it closed")
        if self._client.health_check() == _NOT_SET_UP:
            raise TransportError(
                "no_peer",
                where,
                "expected a client after a setup() that returned 0, found one that is not set up, "
                "or closed; close the store before its client",
            )

    def _put(
        self,
        key: str,
        write: Callable[[Allocate], int],
        replace: bool,
        config: ReplicateConfig | None,
        where: str,
    ) -> int:
        self._check(where)
        # If the key is taken, Mooncake's own put does nothing and reports success.
        if not replace and _checked(self._client.is_exist(_key(key, where)), where):
            raise ArgumentError(
                "conflict", where, "expected a new key, found it taken; pass replace=True"
            )
        lent: list[ByteArray] = []

        def allocate(size: int) -> ByteArray:
            lent.append(self._memory.lend(size, where))
            return lent[0]

        size = write(allocate)
        send = self._client.upsert_from if replace else self._client.put_from
        config = ReplicateConfig() if config is None else config
        self._done(send(key, address(lent[0]), size, config), lent[0], where)
        return size

    def _size(self, key: str, where: str) -> int:
        self._check(where)
        return _checked(self._client.get_size(_key(key, where)), where)

    def _read(self, key: str, where: str) -> ByteArray:
        size = self._size(key, where)
        blob = self._memory.lend(size, where)
        found = self._client.get_into(key, address(blob), size)
        if found == _BAD_PARAMETERS:
            raise _replaced(where, size)
        # Shorter if a smaller value has replaced it since; a blob states its own size.
        return blob[: self._done(found, blob, where)]

    def _read_range(self, key: str, offset: int, size: int) -> ByteArray:
        """Read these bytes of the value under a key, all of which must exist; lent as by `read`."""
        where = f"Store.open({key!r}), bytes {offset} to {offset + size}"
        self._check(where)
        part = self._memory.lend(size, where)
        found = self._client.get_into_ranges(
            [address(part)], [[key]], [[[0]]], [[[offset]]], [[[size]]]
        )[0][0][0]
        if found == _BAD_PARAMETERS or 0 <= found < size:
            raise _replaced(where, offset + size)
        self._done(found, part, where)
        return part

    def _done(self, code: int, memory: ByteArray, where: str) -> int:
        """Return the result of a transfer, unless it is an error."""
        if code == _TRANSFER_FAILED or (code < 0 and code not in _FAILURES):
            # Nothing tells us that the engine will not write to this memory any more.
            self._memory.retire(memory)
        return _checked(code, where)


class _Ranges:
    """A blob in the store, as the range reader that `open_wire` takes."""

    def __init__(self, store: Store, key: str, size: int, read_ahead: int) -> None:
        self._store = store
        self._key = key
        self._size = size
        self._read_ahead = read_ahead
        self._ahead = (0, np.empty(0, dtype=np.uint8))

    def __call__(self, offset: int, size: int) -> memoryview:
        # Read-only, so that whoever keeps a part of it copies that part. Where a read goes beyond
        # the end of the blob, fewer bytes are returned.
        size = min(size, self._size - offset)
        if size <= 0:
            return memoryview(b"")
        start, block = self._ahead
        if not start <= offset <= offset + size <= start + len(block):
            ahead = min(self._read_ahead, self._size - offset)
            block = self._store._read_range(self._key, offset, max(size, ahead))
            start = offset
            if size < ahead:
                self._ahead = (start, block)
        return block[offset - start : offset - start + size].data.toreadonly()


# --- registered memory -------------------------------------------------------------------------


_SMALLEST = 1 << 16


class _Registered:
    """Buffers registered with a client, lent to callers and reused once they are returned."""

    def __init__(self, client: MooncakeDistributedStore, max_bytes: int) -> None:
        self._client = client
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # By size. Deques, because destructors return the buffers and must not take a lock.
        self._free: dict[int, deque[ByteArray]] = defaultdict(deque)
        self._all: dict[int, int] = {}  # address to size
        self._retired: list[ByteArray] = []
        self.closed = False

    def lend(self, size: int, where: str) -> ByteArray:
        """(size,) registered bytes, which belong to the caller until nothing refers to them."""
        capacity = max(_SMALLEST, 1 << (size - 1).bit_length()) if size else _SMALLEST
        with self._lock:
            free = self._free[capacity]
        try:
            memory = free.pop()
        except IndexError:
            memory = self._register(capacity, where)
        return borrowed(address(memory), size, _Lent(memory, free))

    def retire(self, memory: ByteArray) -> None:
        """Never lend this memory again."""
        with self._lock:
            self._retired.append(memory)

    def close(self, *, alive: bool) -> None:
        """Unregister every buffer, and refuse to register new ones."""
        with self._lock:
            self.closed = True
            addresses, self._all = self._all, {}
            self._free.clear()
            self._retired.clear()
        for place in addresses if alive else ():
            self._client.unregister_buffer(place)

    def _register(self, capacity: int, where: str) -> ByteArray:
        with self._lock:
            self._free_up(capacity, where)
            block = np.empty(capacity + ALIGNMENT, dtype=np.uint8)
            memory = block[-address(block) % ALIGNMENT :][:capacity]
            code = self._client.register_buffer(address(memory), capacity)
            if code:
                raise _error(code, where)
            self._all[address(memory)] = capacity
        return memory

    def _free_up(self, capacity: int, where: str) -> None:
        """Unregister buffers of other sizes until `capacity` more bytes are allowed."""
        for free in self._free.values():
            while free and sum(self._all.values()) + capacity > self._max_bytes:
                memory = free.pop()
                self._client.unregister_buffer(address(memory))
                del self._all[address(memory)]
        used = sum(self._all.values())
        if used + capacity > self._max_bytes:
            raise ArgumentError(
                "too_large",
                where,
                f"expected at most {self._max_bytes} bytes of registered memory, found {used} "
                f"in use and {capacity} more needed; let go of what read() lent, or raise "
                "Store(max_bytes)",
            )


class _Lent:
    """Memory under an array, returned to the pool when the array is gone."""

    def __init__(self, memory: ByteArray, free: deque[ByteArray]) -> None:
        self._memory = memory
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._memory)


# --- errors ------------------------------------------------------------------------------------

_NOT_SET_UP = 1  # what health_check says
_BAD_PARAMETERS = -600
_TRANSFER_FAILED = -800

_FAILURES: dict[int, tuple[type[JagcodecError], Reason, str]] = {
    -200: (
        TransportError,
        "no_room",
        "expected room in the store, found it full; remove batches, mount larger segments, or "
        "check that a node has mounted a segment",
    ),
    -703: (TransportError, "busy", "expected a whole value, found one being written; try again"),
    -704: (
        ArgumentKeyError,
        "no_such_key",
        "expected a key in the store, found no such key: it was removed, evicted because the store "
        "was full, or never put",
    ),
    -706: (
        TransportError,
        "busy",
        "expected a value that nobody reads, found it leased; try again later, or pass force=True",
    ),
    _TRANSFER_FAILED: (
        TransportError,
        "peer_failed",
        "expected a transfer, found that the node that holds the value is gone or does not answer",
    ),
    -900: (TransportError, "no_peer", "expected an answer from Mooncake's master, found none"),
    -901: (
        TransportTimeoutError,
        "timed_out",
        "expected an answer from Mooncake's master in time (MC_RPC_TIMEOUT_MS), found none",
    ),
}


def _checked(code: int, where: str) -> int:
    if code < 0:
        raise _error(code, where)
    return code


def _error(code: int, where: str) -> JagcodecError:
    kind, reason, detail = _FAILURES.get(
        code, (TransportError, "peer_failed", "expected success, found an error in Mooncake")
    )
    return kind(reason, where, f"{detail} (Mooncake's code {code})")


def _replaced(where: str, size: int) -> JagcodecError:
    return TransportError(
        "busy",
        where,
        f"expected {size} bytes, found a value of another size: another value was put under this "
        "key while it was being read; try again",
    )


def _key(key: str, where: str) -> str:
    if not isinstance(key, str):
        raise ArgumentTypeError(
            "bad_type", where, f"expected a string as the key, found {type(key).__name__}"
        )
    if not key:
        raise ArgumentError("bad_option", where, "expected a key, found an empty string")
    return key
