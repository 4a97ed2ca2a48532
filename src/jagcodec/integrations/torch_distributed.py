"""Batches between the ranks of a `torch.distributed` job, with jagged and object columns.

Every collective here has the same steps. All ranks exchange a row of integers: which function each
one calls, who failed, and how large the headers are. The headers follow. All ranks then report
whether they could allocate memory for the announced buffers. Finally the buffers of each message
are sent from where they are, each large column in one transfer, without padding and without pickle.

On a backend for CPU tensors (gloo, mpi) the buffers are sent from host memory to host memory. With
NCCL, dense and jagged tensors on the current CUDA device are sent from there to the receiver's
current device without touching the host; headers, offsets, objects and CPU tensors are copied to
the device for the transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from jagcodec import concat_rows, split_rows
from jagcodec._arguments import usable_device
from jagcodec.batch.columns import Batch
from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    TransportError,
    TransportTimeoutError,
    brief,
)
from jagcodec.integrations._rank_message import RankMessage, packed_meta, read_meta
from jagcodec.memory.blocks import Wanted, allocate
from jagcodec.wire.encoder import encode, encode_resident
from jagcodec.wire.frames import buffer_bytes, writable
from jagcodec.wire.limits import Limits
from jagcodec.wire.wire_batch import WireBatch

if not dist.is_available():
    raise ModuleNotFoundError(
        "jagcodec.integrations.torch_distributed needs a torch built with torch.distributed: "
        "pip install torch",
        name="torch.distributed",
    )

__all__ = ["all_gather_rows", "broadcast", "recv", "scatter_rows", "send"]

T = TypeVar("T")


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
        batch: On rank `src` anything that `encode` takes, or a `WireBatch` (all of which is
            read); None on the other ranks.
        src: The global rank that has the batch, as for `torch.distributed.broadcast`.
        group: The ranks that take part, by default all. Each of them must make this call.
        device: Where to put tensors on this rank. None: the CPU, except that with NCCL, tensors
            from the sender's CUDA device go to this rank's current CUDA device.
        allow_pickle: As for `encode` and `decode`; pass the same value on every rank.
        default: As for `encode`.
        limits: As for `decode`. What a rank announces has been received before they are looked at.

    Returns:
        The batch. On rank `src` it is the object that was passed or, if `device` is given, a
        value that may alias it; on other ranks it owns its memory.

    Raises:
        TransportError: Rank `src` or another rank failed before anything was sent, or could not
            allocate memory for the batch; the error names the rank, and repeats its own. Or the
            connection to a rank was lost.
        TransportTimeoutError: The group's time-out passed; its ranks are out of step.
        ArgumentError: Ranks called different functions, or passed a different `src` (every rank
            raises); a rank other than `src` passed a batch; `src` or this process is not in the
            group; `device` is not a valid device; or there is no process group.
        UnsupportedTypeError: On rank `src`, as `encode`; the others raise TransportError.
        WireFormatError: As `decode`, only on the rank that cannot decode the message; `.path`
            names the rank that sent it.
    """
    line = _line(group, "broadcast")
    target: torch.device | None = None
    message: RankMessage | None = None

    def prepare() -> None:
        nonlocal target, message
        target = usable_device(device, "broadcast(device)")
        if line.is_source(src, batch, "batch"):
            message = line.message(_readable(batch), allow_pickle, default)

    sizes = line.agree(src, prepare, lambda: [message.size if message else 0] * line.world)
    place = line.ranks.index(src)
    (received,) = line.broadcast(src, {place: sizes[place][0]}, message)
    if message is not None and target is None:
        return batch
    return received.value(target, allow_pickle, limits)


def scatter_rows(
    batch: Batch | None,
    src: int,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
    default: Callable[[Any], Any] | None = None,
    limits: Limits | None = None,
) -> Any:
    """Scatter one rank's rows: rank i of the group receives the i-th contiguous part.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from jagcodec import BatchedDataDict
        >>> from jagcodec.integrations.torch_distributed import scatter_rows
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> scatter_rows(BatchedDataDict(x=torch.arange(3)), src=0)["x"].tolist()
        [0, 1, 2]
        >>> dist.destroy_process_group()

    Args:
        batch: On rank `src` a TensorDict, a `WireBatch`, a `BatchedDataDict` or a dict of columns;
            None on the other ranks.
        src: The global rank that has the batch.
        group: As for `broadcast`.
        device: As for `broadcast`.
        allow_pickle: As for `broadcast`.
        default: As for `encode`.
        limits: As for `broadcast`.

    Returns:
        This rank's part of ``split_rows(batch, world_size)``: parts differ by one row at most,
        longer ones first. On rank `src` it may alias `batch`.

    Raises:
        ArgumentTypeError: On rank `src`, `batch` is not a kind of batch that has rows; the others
            raise TransportError.
        JagcodecError: As `broadcast`.
    """
    line = _line(group, "scatter_rows")
    target: torch.device | None = None
    mine: Any = None
    messages: list[RankMessage] = []

    def prepare() -> None:
        nonlocal target, mine
        target = usable_device(device, "scatter_rows(device)")
        if line.is_source(src, batch, "batch"):
            parts = _parts(_readable(batch), line.world, line.where)
            mine = parts[line.place]
            messages.extend(line.message(part, allow_pickle, default) for part in parts)

    sizes = line.agree(
        src, prepare, lambda: [message.size for message in messages] or [0] * line.world
    )
    received = line.scatter(src, sizes[line.ranks.index(src)][line.place], messages)
    if messages and target is None:
        return mine
    return received.value(target, allow_pickle, limits)


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
        ArgumentError: As `broadcast`; or the batches differ in their columns, as for
            `concat_rows`, in which case every rank raises.
        JagcodecError: As `broadcast`. A rank whose batch cannot be encoded raises the error of
            `encode`; the others raise TransportError.
    """
    line = _line(group, "all_gather_rows")
    target: torch.device | None = None
    message: RankMessage | None = None

    def prepare() -> None:
        nonlocal target, message
        target = usable_device(device, "all_gather_rows(device)")
        whole = _readable(batch)
        # Checks that this batch has rows before the other ranks wait for them.
        _parts(whole, 1, line.where)
        message = line.message(whole, allow_pickle, default)

    sizes = line.agree(0, prepare, lambda: [message.size if message else 0] * line.world)
    received = line.broadcast(0, {i: row[line.place] for i, row in enumerate(sizes)}, message)
    values = [one.value(target, allow_pickle, limits) for one in received]
    return concat_rows(values)


def send(
    batch: Any,
    dst: int,
    group: dist.ProcessGroup | None = None,
    *,
    allow_pickle: bool = False,
    default: Callable[[Any], Any] | None = None,
) -> None:
    """Send a batch to one rank, which calls `recv`.

    When this returns, the batch may be written to again.

    Example:
        See `docs/torch-distributed.md`.

    Args:
        batch: Anything that `encode` takes, or a `WireBatch`.
        dst: The global rank to send it to.
        group: As for `broadcast`, but only the two ranks make the call.
        allow_pickle: As for `encode`.
        default: As for `encode`.

    Raises:
        UnsupportedTypeError: As `encode`; rank `dst` raises TransportError.
        TransportError: The connection to rank `dst` was lost.
        TransportTimeoutError: The group's time-out passed.
        ArgumentError: `dst` is this rank or not in the group; or there is no process group.
    """
    line = _line(group, "send")
    line.check_peer(dst, "dst")
    try:
        message = line.message(_readable(batch), allow_pickle, default)
    except Exception as error:
        text = _words(error)
        line.send_tensors(dst, [_numbers([_FAILED, len(text)]), _tensor(text)])
        raise
    line.send_tensors(dst, [_numbers([_FINE, message.size]), message.meta])
    line.send_buffers(message, dst)


def recv(
    src: int,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
    limits: Limits | None = None,
) -> Any:
    """Receive a batch from one rank, which calls `send`.

    Example:
        See `docs/torch-distributed.md`.

    Args:
        src: The global rank that sends it.
        group: As for `send`.
        device: As for `broadcast`.
        allow_pickle: As for `decode`.
        limits: As for `broadcast`.

    Returns:
        The value, which owns its memory.

    Raises:
        TransportError: Rank `src` could not encode its batch (the error repeats its own), or the
            connection was lost.
        TransportTimeoutError: The group's time-out passed.
        WireFormatError: As `decode`.
        ArgumentError: `src` is this rank or not in the group; there is no process group; or
            `device` is not a valid device.
    """
    line = _line(group, "recv")
    line.check_peer(src, "src")
    target = usable_device(device, "recv(device)")
    status, size = line.receive_tensor(src, 16).view(torch.int64).tolist()
    if status not in (_FINE, _FAILED) or not 0 <= size <= (_MOST_WORDS if status else size):
        raise line.peer_sent(src, [status, size])
    if status == _FAILED:
        raise line.peer_failed(src, line.receive_tensor(src, size))
    received = line.room(line.receive_tensor(src, size), src)
    return line.receive_buffers(src, received).value(target, allow_pickle, limits)


# --- messages ----------------------------------------------------------------------------------


_FINE, _FAILED = 0, 1
_MOST_WORDS = 4096
"""Bytes of what a rank says of its failure."""
_NAMES = ("broadcast", "scatter_rows", "all_gather_rows", "send", "recv")


def _numbers(numbers: Sequence[int]) -> torch.Tensor:
    # On the CPU, whatever `torch.set_default_device` says: a tensor on another device makes gloo
    # terminate the process.
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").view(torch.uint8)


def _tensor(data: Any) -> torch.Tensor:
    """A buffer as a tensor of bytes that aliases it; it is only read."""
    return torch.from_numpy(writable(buffer_bytes(data, "frame"), copy=False))


def _is_one_of(ranks: Sequence[int], rank: Any) -> bool:
    # A bool is an Integral too, and 1.0 is in [1].
    return isinstance(rank, Integral) and not isinstance(rank, bool) and rank in ranks


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _words(error: BaseException) -> bytes:
    return f"{type(error).__name__}: {error}".encode(errors="replace")[:_MOST_WORDS]


def _readable(batch: Any) -> Any:
    return batch.to_tensordict() if isinstance(batch, WireBatch) else batch


def _parts(batch: Any, count: int, where: str) -> list[Any]:
    try:
        return split_rows(batch, count)
    except (ArgumentError, ArgumentTypeError) as error:  # which name the function
        path = error.path.replace("split_rows", where, 1)
        raise type(error)(error.reason, path, error.detail) from error


# --- a group -----------------------------------------------------------------------------------


def _line(group: dist.ProcessGroup | None, where: str) -> _Line:
    """A group as this rank sees it.

    Raises:
        ArgumentError: There is no process group, or this process is not in it.
    """
    if not dist.is_initialized():
        raise ArgumentError(
            "bad_option",
            f"{where}(group)",
            "expected a process group, found none; call torch.distributed.init_process_group",
        )
    try:
        place = dist.get_rank(group)
    except ValueError as error:
        raise ArgumentError(
            "bad_option", f"{where}(group)", f"expected a process group of this job: {error}"
        ) from error
    if place < 0:
        raise ArgumentError(
            "bad_option",
            f"{where}(group)",
            f"expected a group that this process is in, found one without rank {dist.get_rank()}",
        )
    ranks = dist.get_process_group_ranks(group)
    backends = _backends(group)
    cuda = None
    if backends.get("cuda") == "nccl":
        cuda = torch.device("cuda", torch.cuda.current_device())
    if "cpu" not in backends and cuda is None:
        raise ArgumentError(
            "bad_option",
            f"{where}(group)",
            f"expected a backend for CPU tensors, or NCCL, found {backends}",
        )
    host = torch.device("cpu") if "cpu" in backends or cuda is None else cuda
    return _Line(group, where, place, ranks, host, cuda)


def _backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Device type to backend, out of ``"cpu:gloo,cuda:nccl"``."""
    pairs = dist.get_backend_config(group).split(",")
    return dict(pair.split(":", 1) for pair in pairs)


class _Line(NamedTuple):
    """A group, and how bytes are transferred in it.

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

    @property
    def world(self) -> int:
        return len(self.ranks)

    # Checks, and agreement between the ranks

    def is_source(self, src: Any, batch: Any, name: str) -> bool:
        """Whether this rank is the one that sends."""
        if not _is_one_of(self.ranks, src):
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
                f"{self.where}({name})",
                f"expected None on every rank but src={src}, found {type(batch).__name__} on "
                f"rank {self.ranks[self.place]}",
            )
        return False

    def check_peer(self, peer: Any, name: str) -> None:
        others = [rank for rank in self.ranks if rank != self.ranks[self.place]]
        if not _is_one_of(others, peer):
            raise ArgumentError(
                "bad_option",
                f"{self.where}({name})",
                f"expected the global rank of another member, one of {others}, found {peer!r:.80}",
            )

    def agree(
        self,
        src: Any,
        prepare: Callable[[], None],
        sizes: Callable[[], list[int]] | None = None,
    ) -> list[list[int]]:
        """Call `prepare`, and tell all ranks the outcome, so that none waits for one that failed.

        Returns:
            For each rank, the sizes of the headers that it has for each rank, if `sizes` is given.

        Raises:
            JagcodecError: Some rank failed, or the ranks do not make the same call.
        """
        failure: Exception | None = None
        text = b""
        try:
            prepare()
        except Exception as error:
            failure, text = error, _words(error)
        call = [_NAMES.index(self.where), src if _is_one_of(self.ranks, src) else -1]
        mine = [0] * self.world if failure or sizes is None else sizes()
        table = self._exchanged([*call, len(text), *mine])
        for rank, row in zip(self.ranks, table, strict=True):
            known = 0 <= row[0] < len(_NAMES) and 0 <= row[2] <= _MOST_WORDS
            if not known or min(row[3:], default=0) < 0:
                raise self.peer_sent(rank, row)
        failed = [i for i, row in enumerate(table) if row[2]]
        if failed:
            first = failed[0]
            words = self._broadcast_tensor(first, table[first][2], text if failure else None)
            raise failure or self.peer_failed(self.ranks[first], words)
        if any(row[:2] != table[0][:2] for row in table):
            calls = ", ".join(
                f"{_NAMES[row[0]]}(src={row[1]}) on rank {rank}"
                for row, rank in zip(table, self.ranks, strict=True)
            )
            raise ArgumentError(
                "conflict", self.where, f"expected the same call on every rank, found {calls}"
            )
        return [row[3:] for row in table]

    def _exchanged(self, row: list[int]) -> list[list[int]]:
        mine = torch.tensor(row, dtype=torch.int64, device=self.host)
        rows = [torch.empty_like(mine) for _ in self.ranks]
        with self.reported():
            dist.all_gather(rows, mine, group=self.group)
        return [row.tolist() for row in rows]

    def peer_failed(self, rank: int, words: torch.Tensor) -> TransportError:
        text = bytes(words.numpy()).decode(errors="replace")
        return TransportError(
            "peer_failed",
            f"{self.where}, rank {rank}",
            f"expected this rank to take part, found that it failed: {text}",
        )

    def peer_sent(self, rank: int, numbers: list[int]) -> TransportError:
        return TransportError(
            "peer_failed",
            f"{self.where}, rank {rank}",
            f"expected what this function sends, found the numbers {brief(numbers)}; run the same "
            "version of jagcodec on every rank, and make the group anew",
        )

    @contextmanager
    def has_room(self, rank: int, size: int) -> Iterator[None]:
        """Say who announced what does not fit into memory."""
        try:
            yield
        # Of torch, which has many words for it, of numpy, and of Python.
        except (MemoryError, RuntimeError, ValueError, OverflowError) as error:
            raise TransportError(
                "peer_failed",
                f"{self.where}, rank {rank}",
                f"expected a message that fits into this rank's memory, found one of {size} bytes: "
                f"{type(error).__name__}: {error!s:.200}",
            ) from error

    @contextmanager
    def reported(self) -> Iterator[None]:
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

    # Bytes

    def message(
        self, obj: Any, allow_pickle: bool, default: Callable[[Any], Any] | None
    ) -> RankMessage:
        """A value encoded as a message, ready to be sent."""
        frames: Sequence[Any]
        if self.resident is None:
            frames = encode(obj, allow_pickle=allow_pickle, default=default)
        else:
            frames = encode_resident(obj, self.resident, allow_pickle=allow_pickle, default=default)
        header: Any
        header, *rest = frames
        kept = bytes(isinstance(frame, torch.Tensor) for frame in rest)
        buffers = [f if isinstance(f, torch.Tensor) else _tensor(f) for f in rest]
        meta = _tensor(packed_meta(header, kept, [buffer.numel() for buffer in buffers]))
        origin = f"{self.where}, rank {self.ranks[self.place]}"
        flags = [bool(flag) for flag in kept]
        return RankMessage(meta, memoryview(header), flags, buffers, origin)

    def room(self, meta: torch.Tensor, rank: int) -> RankMessage:
        """Allocate the buffers of a message that is about to be received from a rank."""
        origin = f"{self.where}, rank {rank}"
        header, kept, sizes = read_meta(meta.numpy().data, origin)
        places = [(stays and self.resident) or self.host for stays in kept]
        buffers = [
            Wanted((size,), torch.uint8, place) for size, place in zip(sizes, places, strict=True)
        ]
        with self.has_room(rank, sum(sizes)):
            allocate(buffers)
        return RankMessage(meta, header, kept, [buffer.tensor for buffer in buffers], origin)

    def _arrived(self, message: RankMessage) -> RankMessage:
        """A received message, with the buffers that belong on the host copied there."""
        pairs = zip(message.buffers, message.kept, strict=True)
        return message._replace(buffers=[b if stays else b.cpu() for b, stays in pairs])

    def _outgoing(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.host) if tensor.device.type == "cpu" else tensor

    def _moving(self, message: RankMessage) -> list[torch.Tensor]:
        """The non-empty buffers of a message, on the device that they are transferred on."""
        return [self._outgoing(buffer) for buffer in message.buffers if buffer.numel()]

    def _empty(self, size: int, rank: int) -> torch.Tensor:
        with self.has_room(rank, size):
            return torch.empty(size, dtype=torch.uint8, device=self.host)

    # to all

    def _broadcast_tensor(self, place: int, size: int, data: Any) -> torch.Tensor:
        tensor = self._empty(size, self.ranks[place])
        if place == self.place:
            tensor = self._outgoing(data if isinstance(data, torch.Tensor) else _tensor(data))
        with self.reported():
            dist.broadcast(tensor, self.ranks[place], group=self.group)
        return tensor.cpu()

    def broadcast(
        self, src: int, sizes: dict[int, int], mine: RankMessage | None
    ) -> list[RankMessage]:
        """The messages of the ranks at these places, whose metas have these sizes."""
        metas = {
            place: self._broadcast_tensor(place, size, mine and mine.meta)
            for place, size in sizes.items()
        }
        messages: list[RankMessage] = []
        moving: list[tuple[int, torch.Tensor]] = []

        def make_room() -> None:
            for place, meta in metas.items():
                message = (
                    mine if mine and place == self.place else self.room(meta, self.ranks[place])
                )
                messages.append(message)
                moving.extend((self.ranks[place], tensor) for tensor in self._moving(message))

        self.agree(src, make_room)
        with self.reported():
            _wait([dist.broadcast(t, rank, self.group, async_op=True) for rank, t in moving])
        return [self._arrived(message) for message in messages]

    # to one

    def scatter(self, src: int, size: int, messages: Sequence[RankMessage]) -> RankMessage:
        """The message for this rank, its meta of `size` bytes; rank `src` has all of them."""
        if messages:
            others = {r: m for r, m in zip(self.ranks, messages, strict=True) if r != src}
            for rank, message in others.items():
                self.send_tensors(rank, [message.meta])
            moving: dict[int, list[torch.Tensor]] = {}
            self.agree(src, lambda: moving.update((r, self._moving(m)) for r, m in others.items()))
            self._send_all(moving)
            return messages[self.place]
        meta = self.receive_tensor(src, size)
        rooms: list[RankMessage] = []
        self.agree(src, lambda: rooms.append(self.room(meta, src)))
        return self.receive_buffers(src, rooms[0])

    def send_tensors(self, dst: int, tensors: Sequence[torch.Tensor]) -> None:
        with self.reported():
            for tensor in tensors:
                dist.send(self._outgoing(tensor), dst, group=self.group)

    def send_buffers(self, message: RankMessage, dst: int) -> None:
        """Send the buffers of a message, for `receive_buffers`."""
        self._send_all({dst: self._moving(message)})

    def _send_all(self, moving: dict[int, list[torch.Tensor]]) -> None:
        """Send tensors to ranks; the transfers run concurrently."""
        pairs = [(rank, tensor) for rank, tensors in moving.items() for tensor in tensors]
        with self.reported():
            _wait([dist.isend(tensor, rank, group=self.group) for rank, tensor in pairs])

    def receive_tensor(self, src: int, size: int) -> torch.Tensor:
        tensor = self._empty(size, src)
        with self.reported():
            dist.recv(tensor, src, group=self.group)
        return tensor.cpu()

    def receive_buffers(self, src: int, room: RankMessage) -> RankMessage:
        """Receive the buffers of a message into the memory that `room` allocated."""
        with self.reported():
            _wait([dist.irecv(tensor, src, group=self.group) for tensor in self._moving(room)])
        return self._arrived(room)
