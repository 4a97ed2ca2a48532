"""Batches between the ranks of a `torch.distributed` job.

All ranks first exchange which function each one calls, how large its message is, and its error if
it failed. They do so again when each has allocated memory, and when each has opened the messages,
which are blobs. On a backend for CPU tensors (gloo, mpi) messages go from host memory to host
memory. With NCCL they are copied to the current CUDA device and back, which has not run on a GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist

from jagcodec._arguments import flag_of
from jagcodec.batch.columns import Batch, concat_in_memory
from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    TransportError,
    TransportTimeoutError,
    WireFormatError,
    brief,
)
from jagcodec.memory.blocks import new_block
from jagcodec.memory.plain_types import usable_device
from jagcodec.memory.staging import HostCopies, to_device
from jagcodec.memory.tensor_bytes import ByteArray
from jagcodec.wire.decoder import build
from jagcodec.wire.encoder import encode
from jagcodec.wire.limits import DEFAULT_LIMITS, Limits, exceeded, usable_limits
from jagcodec.wire.message import Message, Reading
from jagcodec.wire.opening import open_message

if not dist.is_available():
    raise ModuleNotFoundError(
        "jagcodec.integrations.torch_distributed needs a torch built with torch.distributed: "
        "pip install torch",
        name="torch.distributed",
    )

__all__ = ["all_gather_rows", "broadcast"]


def broadcast(
    batch: Any,
    src: int,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
    default: Callable[[Any], Any] | None = None,
    limits: Limits | None = None,
) -> Any:
    """Broadcast one rank's batch to every rank of a group.

    Example:
        >>> import torch.distributed as dist
        >>> from jagcodec.integrations.torch_distributed import broadcast
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> broadcast({"step": 3}, src=0)
        {'step': 3}
        >>> dist.destroy_process_group()

    Args:
        batch: On rank `src` anything that `encode` accepts, such as a TensorDict or a `WireBatch`;
            None on the other ranks.
        src: The global rank that has the batch, as for `torch.distributed.broadcast`.
        group: The participating ranks, by default all. Each of them must make this call.
        device: Where to put tensors on this rank; by default the CPU.
        allow_pickle: As for `encode` and `decode`; pass the same value on every rank.
        default: As for `encode`.
        limits: As for `decode`. They are checked before memory is allocated.

    Returns:
        The batch. On rank `src` it is the object that was passed or, if `device` is given, a
        copy; on other ranks it owns its memory.

    Raises:
        TransportError: Another rank failed (the error names it, and repeats its error), or the
            connection to a rank was lost.
        TransportTimeoutError: The group's time-out passed; its ranks are out of step.
        ArgumentError: Ranks made different calls (every rank raises), a rank other than `src`
            passed a batch, or an argument is invalid.
        UnsupportedTypeError, WireFormatError: As `encode` and `decode`, on the rank that fails.
    """
    exchange = _Exchange("broadcast", group, device, allow_pickle, limits)

    def prepare() -> torch.Tensor | None:
        return exchange.encoded(batch, default) if exchange.is_source(src, batch) else None

    ((place, message),) = exchange.messages(src, prepare)
    return batch if place == exchange.place and device is None else exchange.value(place, message)


def all_gather_rows(
    batch: Batch,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
    default: Callable[[Any], Any] | None = None,
    limits: Limits | None = None,
) -> Any:
    """Gather the rows of every rank's batch on every rank, in the order of the group's ranks.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from jagcodec import BatchedDataDict
        >>> from jagcodec.integrations.torch_distributed import all_gather_rows
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> all_gather_rows(BatchedDataDict(x=torch.arange(3)))["x"].tolist()
        [0, 1, 2]
        >>> dist.destroy_process_group()

    The batches are TensorDicts, `WireBatch`es, `BatchedDataDict`s or dicts of columns, of the same
    kind and with the same columns on all ranks, and any number of rows, including zero. The other
    arguments are those of `broadcast`.

    Returns:
        ``concat_rows`` of all batches, in new memory. Raises as `broadcast`; if the batches do not
        fit together, every rank raises the error of `concat_rows`.
    """
    exchange = _Exchange("all_gather_rows", group, device, allow_pickle, limits)
    messages = exchange.messages(None, lambda: exchange.encoded(batch, default))
    return concat_in_memory([exchange.value(*message) for message in messages], "concat_rows")


_NAMES = ("broadcast", "all_gather_rows")
_ROW = struct.Struct("<qqq1000s")  # function, src, bytes of the message, words about a failure


class _Exchange:
    """One call of a function above by this rank, to all ranks of a group."""

    def __init__(
        self, where: str, group: Any, device: Any, allow_pickle: bool, limits: Limits | None
    ) -> None:
        self.where, self.group, self.device = where, group, device
        self.allow_pickle = allow_pickle
        self.limits = DEFAULT_LIMITS if limits is None else limits
        outside: Any = dist.GroupMember.NON_GROUP_MEMBER
        # Torch asks anything for its rank, and may end the process by it.
        if not (group is None or group is outside or isinstance(group, dist.ProcessGroup)):
            detail = f"expected a process group of this job, or None, found {brief(group)}"
            raise ArgumentTypeError("bad_type", f"{where}(group)", detail)
        try:
            self.place = dist.get_rank(group)  # in the group
            if self.place < 0:
                raise ValueError(f"this one is without rank {dist.get_rank()}")
            # Device type to backend, out of "cpu:gloo,cuda:nccl".
            pairs = dist.get_backend_config(group).split(",")
            backends = dict(pair.split(":", 1) for pair in pairs)
            if "cpu" not in backends and backends.get("cuda") != "nccl":
                raise ValueError(f"its backends are {backends}, which need CPU tensors, or NCCL")
        except ValueError as error:
            detail = f"expected a process group of this job: {error}"
            raise ArgumentError("bad_option", f"{where}(group)", detail) from error
        # Global ones. None means all ranks of the job, but not to this function of older versions.
        self.ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        self.carrier = torch.device("cpu")  # that bytes are transferred on
        if "cpu" not in backends:
            self.carrier = torch.device("cuda", torch.cuda.current_device())

    def is_source(self, src: Any, batch: Any) -> bool:
        """Whether this rank is the one that sends."""
        this_rank = self.ranks[self.place]
        if not self._is_rank(src):
            found = f"expected a global rank of the group, one of {self.ranks}, found {brief(src)}"
            raise ArgumentError("bad_option", f"{self.where}(src)", found)
        if src != this_rank and batch is not None:
            found = f"{type(batch).__name__} on rank {this_rank}"
            expected = f"expected None on every rank but src={src}, found {found}"
            raise ArgumentError("conflict", f"{self.where}(batch)", expected)
        return bool(src == this_rank)

    def _is_rank(self, src: Any) -> bool:
        # A bool is an Integral too, and 1.0 is in [1].
        return isinstance(src, Integral) and not isinstance(src, bool) and src in self.ranks

    def encoded(self, batch: Any, default: Callable[[Any], Any] | None) -> torch.Tensor:
        """A batch as a message in one piece."""
        blobs = []

        def make_room(size: int) -> ByteArray:
            blobs.append(new_block(size).data)
            return blobs[0]

        encode(batch, out=make_room, allow_pickle=self.allow_pickle, default=default)
        return torch.from_numpy(blobs[0])

    def value(self, place: int, message: Message) -> Any:
        """The batch of a message that came from this place."""
        with self._named(place):
            return build(message, message.header.schema.root)

    def messages(
        self, src: int | None, prepare: Callable[[], torch.Tensor | None]
    ) -> list[tuple[int, Message]]:
        """The message of rank `src`, or those of all, with the places of their senders."""

        def checked() -> torch.Tensor | None:
            usable_device(self.device, f"{self.where}(device)")
            usable_limits(self.limits, f"{self.where}(limits)")
            self.allow_pickle = flag_of(self.allow_pickle, f"{self.where}(allow_pickle)")
            return prepare()

        encoded, sizes = self._agree(src, checked)
        places = range(len(self.ranks)) if src is None else [self.ranks.index(src)]

        def opened(place: int, blob: torch.Tensor) -> tuple[int, Message]:
            device = usable_device(self.device, self.where)
            with self._named(place):
                how = Reading(self.limits, None, device, self.allow_pickle)
                return place, open_message(blob.numpy(), "message", how)

        blobs, _ = self._agree(src, lambda: [(i, self._room(i, sizes[i], encoded)) for i in places])
        arrived = self._broadcast(blobs)
        messages: list[tuple[int, Message]]
        messages, _ = self._agree(src, lambda: [*map(opened, places, arrived)])
        return messages

    def _room(self, place: int, size: int, encoded: torch.Tensor | None) -> torch.Tensor:
        """Memory for a message to be received, on the carrier; this rank's own one has it."""
        if encoded is not None and place == self.place:
            return encoded
        most = self.limits.bytes
        if size > most:
            raise exceeded("bytes", most, size, "bytes", f"{self._origin(place)}: header")
        try:
            if self.carrier.type != "cpu":
                return torch.empty(size, dtype=torch.uint8, device=self.carrier)
            return torch.from_numpy(new_block(size).data)
        except (MemoryError, ValueError, OverflowError, torch.OutOfMemoryError) as error:
            detail = f"expected a message that fits into memory, found {size} bytes: {error!s:.200}"
            raise self._peer_failed(place, detail) from error

    # What the ranks tell each other

    def _agree(self, src: int | None, step: Callable[[], Any]) -> tuple[Any, list[int]]:
        """The result of a step, and its bytes on each rank; no rank waits for one that failed."""
        failure, words, result = None, b"", None
        try:
            result = step()
        except Exception as error:
            failure = error
            words = f"{type(error).__name__}: {error}".encode(errors="replace")
        size = len(result) if isinstance(result, torch.Tensor) else 0
        call = (_NAMES.index(self.where), src if self._is_rank(src) else -1)
        table = [_ROW.unpack(row) for row in self._exchanged(_ROW.pack(*call, size, words))]
        for place, (name, _, size, words) in enumerate(table):
            if not 0 <= name < len(_NAMES) or size < 0:
                detail = f"expected numbers of this function, found {name} and {size}"
                raise self._peer_failed(place, f"{detail}; install one version on every rank")
            if words[0]:
                said = words.rstrip(b"\0").decode(errors="replace")
                raise failure or self._peer_failed(place, f"expected it to take part, found {said}")
        if any(row[:2] != table[0][:2] for row in table):
            calls = ", ".join(
                f"{_NAMES[row[0]]}({f'src={row[1]}' if row[1] >= 0 else ''}) on rank {rank}"
                for row, rank in zip(table, self.ranks, strict=True)
            )
            detail = f"expected the same call on every rank, found {calls}"
            raise ArgumentError("conflict", self.where, detail)
        return result, [row[2] for row in table]

    def _exchanged(self, row: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(self.carrier)
        rows = [torch.empty_like(mine) for _ in self.ranks]
        with self._backend_errors():
            dist.all_gather(rows, mine, group=self.group)
        return [row.cpu().numpy().tobytes() for row in rows]

    def _broadcast(self, sent: Sequence[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
        """Send the bytes of the rank at each place to memory of the same size on every rank."""
        moving = [(self.ranks[place], to_device(data, self.carrier)) for place, data in sent]
        with self._backend_errors():
            works = [
                dist.broadcast(data, rank, self.group, async_op=True)
                for rank, data in moving
                if data.numel()
            ]
            for work in works:
                work.wait()
        arrived = [data for _, data in sent]  # that of this rank has been on the host before
        copies = HostCopies(kept=True)
        copies.fetch(arrived)
        return [copies.of(data) for data in arrived]

    # Errors

    def _origin(self, place: int) -> str:
        return f"{self.where}, rank {self.ranks[place]}"

    def _peer_failed(self, place: int, detail: str) -> TransportError:
        return TransportError("peer_failed", self._origin(place), detail)

    @contextmanager
    def _named(self, place: int) -> Iterator[None]:
        """Put the rank that sent a message before the path of its fault."""
        try:
            yield
        except WireFormatError as error:
            path = f"{self._origin(place)}: {error.path}"
            raise WireFormatError(error.reason, path, error.detail) from error

    @contextmanager
    def _backend_errors(self) -> Iterator[None]:
        """Raise the backends' errors about lost peers and time-outs as errors of this library."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            late = any(word in str(error).lower() for word in ("timed out", "timeout"))
            kind = TransportTimeoutError if late else TransportError
            found = f"{error!s:.400}. Messages may be lost"
            detail = f"expected every rank to take part, found {found}: make the group anew"
            raise kind("timed_out" if late else "no_peer", self.where, detail) from error
