"""Batches in Mooncake's distributed store: `Store`, over a client that the caller has set up.

A value is one blob under one key. It is packed straight into memory that the transfer engine
knows, and read whole, or a few ranges of it: the columns and rows that are wanted.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, TypeAlias

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
from jagcodec.pack.columns import encode_fields
from jagcodec.wire.blobs import encode_batch_into
from jagcodec.wire.decoder import decode
from jagcodec.wire.frames import blob_size, finished, write_blob
from jagcodec.wire.lazy import WireBatch, open_wire
from jagcodec.wire.spec import ALIGNMENT

try:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "jagcodec.integrations.mooncake needs Mooncake: pip install 'jagcodec[mooncake]', or a "
        "mooncake-transfer-engine for your accelerator",
        name=error.name,
    ) from error
except ImportError as error:
    raise ImportError(
        f"jagcodec.integrations.mooncake needs libraries of the system for Mooncake: {error}; on "
        "Debian: apt-get install libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4"
    ) from error

__all__ = ["Store"]

Allocate: TypeAlias = Callable[[int], ByteArray]
"""Takes a size, returns memory of it to write to."""


class Store:
    """Batches under keys of a Mooncake store.

    What it returns is the caller's own memory; only `read` lends registered memory, for as long
    as anything refers to it. No call waits without end: Mooncake gives up on a master or a node
    that does not answer after 30 seconds (its MC_RPC_TIMEOUT_MS and MC_TCP_STATUS_TIMEOUT_SEC).
    Threads may share a store.

    Args:
        client: A `MooncakeDistributedStore` after a `setup` that returned 0. It stays the
            caller's: close this store first, then the client. One client may serve several.
        max_bytes: Memory to register at most. Buffers are kept for the next call.

    Raises:
        ArgumentTypeError: `client` is none.
        ArgumentError: `max_bytes` is not positive.
        TransportError: The client is not set up, or is closed.

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
        **options: bool,
    ) -> int:
        """Put a value: its tensors are copied once, into registered memory, and sent from there.

        Args:
            key: Not empty.
            obj: Anything that `encode` takes: a TensorDict, a `BatchedDataDict`, a dict, ...; or
                a `WireBatch`, of which the chosen rows and columns are put.
            replace: Put it in the place of what is there. Mooncake writes over it: who reads
                it at that moment may get some of each, which ``checksum=True`` turns into an
                error for `get` and `decode`. Better give each step a key of its own.
            config: Where replicas go, and whether they may be evicted; Mooncake's default
                is one replica on any node, evicted when the store is full.
            options: `narrow`, `checksum`, `allow_pickle` of `encode`; none for a `WireBatch`.

        Returns:
            Bytes put.

        Raises:
            ArgumentError: The key is taken (but of two writers at the same moment Mooncake keeps
                one, and tells neither), it is none, or the value needs more than `max_bytes`.
            TransportError: There is no room in the store, no answer from the master, or the
                transfer failed.
            UnsupportedTypeError: As `encode`; nothing was put.
        """
        where = f"Store.put({key!r})"

        def write(allocate: Allocate) -> int:
            if isinstance(obj, WireBatch):
                message = finished(obj.to_frames())
                return write_blob(message, allocate(blob_size(message)))
            (blob,) = encode_batch_into([obj], allocate, **options)
            return blob.nbytes

        if options and isinstance(obj, WireBatch):
            raise ArgumentError(
                "bad_option",
                where,
                f"expected no options for a WireBatch, whose message is written already, found "
                f"{', '.join(options)}; put its to_tensordict()",
            )

        return self._put(key, write, replace, config, where)

    def put_fields(
        self,
        key: str,
        fields: Mapping[str, Any],
        *,
        lengths: torch.Tensor | None,
        token_aligned_fields: Iterable[str] | None = None,
        replace: bool = False,
        config: ReplicateConfig | None = None,
        **options: bool,
    ) -> int:
        """Put padded columns: `encode_fields`, the rows gathered straight into registered memory.

        Args:
            key: As for `put`.
            fields: As for `encode_fields`.
            lengths: As there.
            token_aligned_fields: As there.
            replace: As for `put`.
            config: As for `put`.
            options: `narrow`, `checksum`, `allow_pickle` of `encode`.

        Returns:
            Bytes put.

        Raises:
            ArgumentError: As from `encode_fields` and `put`.
            ArgumentTypeError: As from `encode_fields`.
            TransportError: As from `put`.
            UnsupportedTypeError: As from `encode`; nothing was put.
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
    ) -> Any:
        """The value under a key.

        Args:
            key: As it was put.
            device: As for `decode`.
            allow_pickle: As for `decode`.

        Returns:
            As `decode`, in memory of its own: one block, which tensors keep alive.

        Raises:
            ArgumentKeyError: There is no such key: never put, removed, or evicted.
            ArgumentError: It needs more than `max_bytes`.
            TransportError: It is being written, or it did not get across.
            WireFormatError: As `decode`: foreign, cut, or damaged.
        """
        lent = self._read(key, f"Store.get({key!r})")
        return decode(lent.copy(), device=device, allow_pickle=allow_pickle)

    def read(self, key: str) -> memoryview:
        """The blob under a key, for `decode` and `open_wire`, without a copy.

        It lies in registered memory. That is lent until nothing refers to it any more, the
        tensors of `decode` among them, and counts towards `max_bytes`. After `close` it stays
        valid, as plain memory. ``materialize(open_wire(store.read(key)))`` copies every token
        once, from there to its rectangle; columns that were never packed alias it.

        Raises:
            As `get`, but for WireFormatError.
        """
        return self._read(key, f"Store.read({key!r})").data

    def open(
        self,
        key: str,
        *,
        device: torch.device | str | None = None,
        allow_pickle: bool = False,
        read_ahead: int = 1 << 18,
    ) -> WireBatch:
        """The batch under a key, of which only what is asked for is read.

        Args:
            key: As it was put. Do not put another value under it while the batch is in use.
            device: As for `open_wire`.
            allow_pickle: As for `open_wire`.
            read_ahead: Bytes that a smaller read becomes, so that the header comes at once, and
                rows that lie near each other together. Worth about one round trip.

        Returns:
            A `WireBatch`. A contiguous range of rows of a column is one read. Whatever it hands
            out owns its memory; ``materialize`` pads straight from what was read. Checksums are
            not verified.

        Raises:
            ArgumentKeyError: There is no such key; later, if it has gone since.
            ArgumentError: As `get`; or `read_ahead` is negative.
            TransportError: As `get`, now and whenever something is read.
            WireFormatError: As `open_wire`; later, if a field is malformed or cut off.
        """
        where = f"Store.open({key!r})"
        if read_ahead < 0:
            raise ArgumentError(
                "bad_option", f"{where}(read_ahead)", f"expected 0 or more, found {read_ahead}"
            )
        source = _Ranges(self, key, self._size(key, where), read_ahead)
        return open_wire(source, device=device, allow_pickle=allow_pickle)

    def remove(self, key: str, *, force: bool = False) -> None:
        """Remove what is under a key.

        Args:
            key: As it was put.
            force: Also when it was read in the last 10 seconds, for which Mooncake's master
                leases it to its readers (`--default_kv_lease_ttl`).

        Raises:
            ArgumentKeyError: There is no such key.
            TransportError: It is leased or being written, or the master did not answer.
        """
        where = f"Store.remove({key!r})"
        self._check(where)
        _checked(self._client.remove(_key(key, where), force), where)

    def close(self) -> None:
        """Give back the registered memory. The client stays open, what `read` lent stays valid."""
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
        """Refuse what would be a segmentation fault inside Mooncake."""
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
        # Mooncake's put does nothing where there is something, and reports success.
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
        # Less if a smaller one has taken its place since; a blob says where it ends.
        return blob[: self._done(found, blob, where)]

    def _read_range(self, key: str, offset: int, size: int) -> ByteArray:
        """These bytes of what is under a key, lent as by `read`; they must be there."""
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
        """What a transfer returned, unless that is an error."""
        if code == _TRANSFER_FAILED or (code < 0 and code not in _FAILURES):
            # Nobody says that the engine has let go of it.
            self._memory.retire(memory)
        return _checked(code, where)


class _Ranges:
    """A blob in the store as `open_wire` reads it."""

    def __init__(self, store: Store, key: str, size: int, read_ahead: int) -> None:
        self._store = store
        self._key = key
        self._size = size
        self._read_ahead = read_ahead
        self._ahead = (0, np.empty(0, dtype=np.uint8))

    def __call__(self, offset: int, size: int) -> memoryview:
        # As read-only memory, so that who keeps some of it copies it; what is cut off stays away.
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
    """Buffers that are registered with a client: lent, and lent again when they come back."""

    def __init__(self, client: MooncakeDistributedStore, max_bytes: int) -> None:
        self._client = client
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # By size. A deque, for buffers come back from destructors, which must take no lock.
        self._free: dict[int, deque[ByteArray]] = defaultdict(deque)
        self._all: dict[int, int] = {}  # address to size
        self._retired: list[ByteArray] = []
        self.closed = False

    def lend(self, size: int, where: str) -> ByteArray:
        """(size,) registered bytes, the caller's until nothing refers to them."""
        room = max(_SMALLEST, 1 << (size - 1).bit_length()) if size else _SMALLEST
        with self._lock:
            free = self._free[room]
        try:
            memory = free.pop()
        except IndexError:
            memory = self._register(room, where)
        return borrowed(address(memory), size, _Lent(memory, free))

    def retire(self, memory: ByteArray) -> None:
        """Keep memory that is lent from being lent again."""
        with self._lock:
            self._retired.append(memory)

    def close(self, *, alive: bool) -> None:
        """Register nothing any more, and nothing new."""
        with self._lock:
            self.closed = True
            addresses, self._all = self._all, {}
            self._free.clear()
            self._retired.clear()
        for place in addresses if alive else ():
            self._client.unregister_buffer(place)

    def _register(self, room: int, where: str) -> ByteArray:
        with self._lock:
            self._make_room(room, where)
            block = np.empty(room + ALIGNMENT, dtype=np.uint8)
            memory = block[-address(block) % ALIGNMENT :][:room]
            code = self._client.register_buffer(address(memory), room)
            if code:
                raise _error(code, where)
            self._all[address(memory)] = room
        return memory

    def _make_room(self, room: int, where: str) -> None:
        """Unregister buffers of other sizes until `room` more bytes are allowed."""
        for free in self._free.values():
            while free and sum(self._all.values()) + room > self._max_bytes:
                memory = free.pop()
                self._client.unregister_buffer(address(memory))
                del self._all[address(memory)]
        used = sum(self._all.values())
        if used + room > self._max_bytes:
            raise ArgumentError(
                "too_large",
                where,
                f"expected at most {self._max_bytes} bytes of registered memory, found {used} "
                f"in use and {room} more to use; let go of what read() lent, or raise "
                "Store(max_bytes)",
            )


class _Lent:
    """Memory that an array refers to, and goes back when none does."""

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
        "expected room in the store, found none; remove batches, mount larger segments, or see "
        "whether a node is mounted at all",
    ),
    -703: (TransportError, "busy", "expected a whole value, found one being written; try again"),
    -704: (
        ArgumentKeyError,
        "no_such_key",
        "expected a key in the store, found none: never put, removed, or evicted when it was full",
    ),
    -706: (
        TransportError,
        "busy",
        "expected a value that nobody reads, found it leased; try again later, or pass force=True",
    ),
    _TRANSFER_FAILED: (
        TransportError,
        "peer_failed",
        "expected a transfer, found that the node which holds the value is gone or does not answer",
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
        code, (TransportError, "peer_failed", "expected success, found an error of Mooncake's")
    )
    return kind(reason, where, f"{detail} (Mooncake's code {code})")


def _replaced(where: str, size: int) -> JagcodecError:
    return TransportError(
        "busy",
        where,
        f"expected {size} bytes, found fewer or more: another value was put under this key while "
        "it was read; try again",
    )


def _key(key: str, where: str) -> str:
    if not isinstance(key, str):
        raise ArgumentTypeError(
            "bad_type", where, f"expected a string for a key, found {type(key).__name__}"
        )
    if not key:
        raise ArgumentError("bad_option", where, "expected a key, found an empty one")
    return key
