"""Batches between the ranks of a `torch.distributed` job, with jagged and object columns.

Both functions have the same steps. All ranks exchange a row of integers: which function each one
calls, whether it failed, and how large its header is. The headers follow. All ranks then report
whether they could read them and allocate memory for the buffers. Finally the buffers are sent from
where they are, each large column in one transfer, without padding and without pickle.

On a backend for CPU tensors (gloo, mpi) the buffers are sent from host memory to host memory. With
NCCL, dense and jagged tensors on the current CUDA device are sent from there to the receiver's
current device without touching the host; headers, offsets, objects and CPU tensors are copied to
the device for the transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from jagcodec._arguments import usable_device
from jagcodec.batch.columns import Batch, concat_in_memory
from jagcodec.errors import (
    ArgumentError,
    TransportError,
    TransportTimeoutError,
    WireFormatError,
    brief,
)
from jagcodec.memory.blocks import Wanted, allocate
from jagcodec.wire.decoder import decode_resident
from jagcodec.wire.encoder import encode_resident
from jagcodec.wire.frames import buffer_bytes, writable
from jagcodec.wire.header import read_header
from jagcodec.wire.limits import DEFAULT_LIMITS, Limits, usable_limits

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

    Typically a leader fetches the batch and its tensor-parallel peers receive it.

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
        group: The ranks that take part, by default all. Each of them must make this call.
        device: Where to put tensors on this rank. None: the CPU, except that with NCCL, tensors
            from the sender's CUDA device go to this rank's current CUDA device.
        allow_pickle: As for `encode` and `decode`; pass the same value on every rank.
        default: As for `encode`.
        limits: As for `decode`. They are checked before memory is allocated.

    Returns:
        The batch. On rank `src` it is the object that was passed or, if `device` is given, a
        value that may alias it; on other ranks it owns its memory.

    Raises:
        TransportError: Another rank failed before the buffers were sent: it could not encode its
            batch, read a header, or allocate memory. The error names the rank, and repeats its
            own. Or the connection to a rank was lost.
        TransportTimeoutError: The group's time-out passed; its ranks are out of step.
        ArgumentError: Ranks called different functions, or passed a different `src` (every rank
            raises); a rank other than `src` passed a batch; `src` or this process is not in the
            group; `device` is not a valid device; or there is no process group.
        UnsupportedTypeError: On rank `src`, as `encode`; the others raise TransportError.
        WireFormatError: As `decode`, only on the rank that cannot decode the message; `.path`
            names the rank that sent it.
    """
    exchange = _exchange(group, "broadcast", device, allow_pickle, limits)

    def prepare() -> _Message | None:
        return exchange.message(batch, default) if exchange.is_source(src, batch) else None

    sent, (received,) = exchange.messages(src, prepare)
    if sent and device is None:
        return batch
    return exchange.value(received)


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

    Args:
        batch: A TensorDict, a `WireBatch`, a `BatchedDataDict` or a dict of columns, with any
            number of rows, including zero; of the same kind and with the same columns on all
            ranks.
        group: As for `broadcast`.
        device: As for `broadcast`.
        allow_pickle: As for `broadcast`.
        default: As for `encode`.
        limits: As for `broadcast`.

    Returns:
        ``concat_rows`` of all batches, in new memory.

    Raises:
        ArgumentError: As `broadcast`. If the batches differ in their columns, or one of them is
            not a kind of batch that has rows, every rank raises the error of `concat_rows`.
        JagcodecError: As `broadcast`. A rank whose batch cannot be encoded raises the error of
            `encode`; the others raise TransportError.
    """
    exchange = _exchange(group, "all_gather_rows", device, allow_pickle, limits)
    _, received = exchange.messages(None, lambda: exchange.message(batch, default))
    return concat_in_memory([exchange.value(message) for message in received], "concat_rows")


# --- messages ----------------------------------------------------------------------------------


class _Message(NamedTuple):
    """A message as tensors of bytes.

    Attributes:
        meta: On the CPU: the header, then one flag per buffer: whether it stays on its device.
        buffers: The frames after the header.
        origin: The function that is running, and the rank that sends the message.
    """

    meta: torch.Tensor
    buffers: list[torch.Tensor]
    origin: str

    @property
    def header(self) -> torch.Tensor:
        return self.meta[: self.meta.numel() - len(self.buffers)]

    @property
    def kept(self) -> list[bool]:
        return _flags(self.meta, len(self.buffers))


def _flags(meta: torch.Tensor, count: int) -> list[bool]:
    return meta[meta.numel() - count :].bool().tolist()


def _tensor(data: Any) -> torch.Tensor:
    """A buffer as a tensor of bytes that aliases it; it is only read."""
    return torch.from_numpy(writable(buffer_bytes(data, "frame"), copy=False))


@contextmanager
def _named(origin: str) -> Iterator[None]:
    """Put the rank that sent a message before the path of what is wrong with it."""
    try:
        yield
    except WireFormatError as error:
        path = f"{origin}: {error.path}"
        raise WireFormatError(error.reason, path, error.detail) from error


# --- a group -----------------------------------------------------------------------------------


def _exchange(
    group: dist.ProcessGroup | None,
    where: str,
    device: Any,
    allow_pickle: bool,
    limits: Limits | None,
) -> _Exchange:
    """A call of this rank to the others of a group.

    Raises:
        ArgumentError: There is no process group, or this process is not in it.
    """
    if not dist.is_initialized():
        detail = "expected a process group, found none; call torch.distributed.init_process_group"
        raise _bad_group(where, detail)
    try:
        place = dist.get_rank(group)
    except ValueError as error:
        raise _bad_group(where, f"expected a process group of this job: {error}") from error
    if place < 0:
        without = f"found one without rank {dist.get_rank()}"
        raise _bad_group(where, f"expected a group that this process is in, {without}")
    # Device type to backend, out of "cpu:gloo,cuda:nccl".
    pairs = dist.get_backend_config(group).split(",")
    backends = dict(pair.split(":", 1) for pair in pairs)
    cuda = None
    if backends.get("cuda") == "nccl":
        cuda = torch.device("cuda", torch.cuda.current_device())
    if "cpu" not in backends and cuda is None:
        expected = "expected a backend for CPU tensors, or NCCL"
        raise _bad_group(where, f"{expected}, found {backends}")
    host = torch.device("cpu") if "cpu" in backends or cuda is None else cuda
    ranks = dist.get_process_group_ranks(group)
    return _Exchange(group, where, place, ranks, host, cuda, device, allow_pickle, limits)


def _bad_group(where: str, detail: str) -> ArgumentError:
    return ArgumentError("bad_option", f"{where}(group)", detail)


_NAMES = ("broadcast", "all_gather_rows")
_MOST_WORDS = 4096
"""Bytes of what a rank says of its failure."""


class _Exchange(NamedTuple):
    """One call of a function above, and how bytes are transferred in its group.

    Attributes:
        where: The public function that is running, for errors.
        place: This rank's number in the group.
        ranks: Global ranks, in the order of the group.
        host: The device that host bytes are transferred on.
        resident: The device whose tensors are sent from it and received on it; None where
            everything goes through the host.
    """

    group: dist.ProcessGroup | None
    where: str
    place: int
    ranks: list[int]
    host: torch.device
    resident: torch.device | None
    device: Any
    allow_pickle: bool
    limits: Limits | None

    def is_source(self, src: Any, batch: Any) -> bool:
        """Whether this rank is the one that sends."""
        if not self._is_rank(src):
            raise ArgumentError(
                "bad_option",
                f"{self.where}(src)",
                f"expected a global rank of the group, one of {self.ranks}, found {src!r:.80}",
            )
        if src == self.ranks[self.place]:
            return True
        if batch is not None:
            raise ArgumentError(
                "conflict",
                f"{self.where}(batch)",
                f"expected None on every rank but src={src}, found {type(batch).__name__} on "
                f"rank {self.ranks[self.place]}",
            )
        return False

    def _is_rank(self, src: Any) -> bool:
        # A bool is an Integral too, and 1.0 is in [1].
        return isinstance(src, Integral) and not isinstance(src, bool) and src in self.ranks

    def message(self, batch: Any, default: Callable[[Any], Any] | None) -> _Message:
        """A batch encoded, ready to be sent."""
        header, *frames = encode_resident(
            batch, self.resident, allow_pickle=self.allow_pickle, default=default
        )
        flags = bytes(isinstance(frame, torch.Tensor) for frame in frames)
        buffers = [f if isinstance(f, torch.Tensor) else _tensor(f) for f in frames]
        return _Message(_tensor(bytes(header) + flags), buffers, self._origin(self.place))

    def value(self, message: _Message) -> Any:
        """The batch of a message."""
        with _named(message.origin):
            return decode_resident(
                message.header.numpy(),
                message.buffers,
                message.kept,
                device=usable_device(self.device, f"{self.where}(device)"),
                allow_pickle=self.allow_pickle,
                limits=self.limits,
            )

    def messages(
        self, src: int | None, prepare: Callable[[], _Message | None]
    ) -> tuple[bool, list[_Message]]:
        """Whether this rank sent a message, and the message of rank `src`, or those of all."""
        mine: list[_Message] = []
        rooms: list[_Message] = []

        def start() -> tuple[int, int]:
            usable_device(self.device, f"{self.where}(device)")
            usable_limits(self.limits or DEFAULT_LIMITS, f"{self.where}(limits)")
            message = prepare()
            if message is None:
                return 0, 0
            mine.append(message)
            return message.meta.numel(), len(message.buffers)

        sizes = self._agree(src, start)
        places = range(len(self.ranks)) if src is None else [self.ranks.index(src)]
        metas = [
            self._broadcast_bytes(place, sizes[place][0], mine[0].meta if mine else None)
            for place in places
        ]

        def make_room() -> tuple[int, int]:
            for place, meta in zip(places, metas, strict=True):
                own = mine and place == self.place
                rooms.append(mine[0] if own else self._room(place, meta, sizes[place][1]))
            return 0, 0

        self._agree(src, make_room)
        # Those on the host, copied to where the group transfers them.
        moving = [[self._outgoing(b) for b in message.buffers] for message in rooms]
        with self._reported():
            works = [
                dist.broadcast(buffer, self.ranks[place], self.group, async_op=True)
                for place, buffers in zip(places, moving, strict=True)
                for buffer in buffers
                if buffer.numel()
            ]
            for work in works:
                work.wait()
        received = []
        for message, buffers in zip(rooms, moving, strict=True):
            pairs = zip(buffers, message.kept, strict=True)
            arrived = [buffer if stays else buffer.cpu() for buffer, stays in pairs]
            received.append(message._replace(buffers=arrived))
        return bool(mine), received

    def _room(self, place: int, meta: torch.Tensor, count: int) -> _Message:
        """A message to be received, with memory for its buffers."""
        origin = self._origin(place)
        with _named(origin):
            header = read_header(
                meta[: max(meta.numel() - count, 0)].numpy(), self.limits or DEFAULT_LIMITS
            )
            if len(header.stored) != count:
                found = f"found {len(header.stored)}"
                raise WireFormatError("bad_header", "header", f"expected {count} frames, {found}")
        places = [(stays and self.resident) or self.host for stays in _flags(meta, count)]
        buffers = [
            Wanted((size,), torch.uint8, device)
            for size, device in zip(header.stored, places, strict=True)
        ]
        with self._has_room(place, sum(header.stored)):
            allocate(buffers)
        return _Message(meta, [buffer.tensor for buffer in buffers], origin)

    # What the ranks tell each other

    def _agree(
        self, src: int | None, prepare: Callable[[], tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Call `prepare`, and tell all ranks the outcome, so that none waits for one that failed.

        Returns:
            What it returned on each rank: the size of its meta, and how many buffers it sends.

        Raises:
            JagcodecError: Some rank failed, or the ranks do not make the same call.
        """
        failure: Exception | None = None
        words, numbers = b"", (0, 0)
        try:
            numbers = prepare()
        except Exception as error:
            failure = error
            words = f"{type(error).__name__}: {error}".encode(errors="replace")[:_MOST_WORDS]
        call = [_NAMES.index(self.where), src if self._is_rank(src) else -1]
        table = self._exchanged([*call, len(words), *numbers])
        for place, row in enumerate(table):
            known = 0 <= row[0] < len(_NAMES) and 0 <= row[2] <= _MOST_WORDS
            if not known or not 0 <= row[4] <= row[3]:
                raise self._failed(
                    place,
                    f"expected what this function sends, found the numbers {brief(row)}; run the "
                    "same version of jagcodec on every rank, and make the group anew",
                )
        failed = next((place for place, row in enumerate(table) if row[2]), None)
        if failed is not None:
            words = bytes(self._broadcast_bytes(failed, table[failed][2], _tensor(words)).numpy())
            said = words.decode(errors="replace")
            raise failure or self._failed(
                failed, f"expected this rank to take part, found that it failed: {said}"
            )
        if any(row[:2] != table[0][:2] for row in table):
            calls = ", ".join(
                f"{_NAMES[row[0]]}({f'src={row[1]}' if row[1] >= 0 else ''}) on rank {rank}"
                for row, rank in zip(table, self.ranks, strict=True)
            )
            raise ArgumentError(
                "conflict", self.where, f"expected the same call on every rank, found {calls}"
            )
        return [(row[3], row[4]) for row in table]

    def _exchanged(self, row: Sequence[Any]) -> list[list[int]]:
        mine = torch.tensor(row, dtype=torch.int64, device=self.host)
        rows = [torch.empty_like(mine) for _ in self.ranks]
        with self._reported():
            dist.all_gather(rows, mine, group=self.group)
        return [row.tolist() for row in rows]

    def _broadcast_bytes(self, place: int, size: int, mine: torch.Tensor | None) -> torch.Tensor:
        """So many bytes of the rank at this place, on the CPU of every rank."""
        with self._has_room(place, size):
            tensor = torch.empty(size, dtype=torch.uint8, device=self.host)
        if place == self.place and mine is not None:
            tensor = self._outgoing(mine)
        with self._reported():
            dist.broadcast(tensor, self.ranks[place], group=self.group)
        return tensor.cpu()

    def _outgoing(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.host) if tensor.device.type == "cpu" else tensor

    # Errors

    def _origin(self, place: int) -> str:
        return f"{self.where}, rank {self.ranks[place]}"

    def _failed(self, place: int, detail: str) -> TransportError:
        return TransportError("peer_failed", self._origin(place), detail)

    @contextmanager
    def _has_room(self, place: int, size: int) -> Iterator[None]:
        """Name the rank that announced what does not fit into memory."""
        try:
            yield
        # Of torch, which has many words for it, of numpy, and of Python.
        except (MemoryError, RuntimeError, ValueError, OverflowError) as error:
            raise self._failed(
                place,
                f"expected a message that fits into this rank's memory, found one of {size} bytes: "
                f"{type(error).__name__}: {error!s:.200}",
            ) from error

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Raise the backends' errors about lost peers and time-outs as errors of this library."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            late = any(word in str(error).lower() for word in ("timed out", "timeout"))
            kind = TransportTimeoutError if late else TransportError
            raise kind(
                "timed_out" if late else "no_peer",
                self.where,
                "expected every rank of the group to take part, found that one did not: "
                f"{error!s:.400}. Messages may be lost: make the group anew",
            ) from error
