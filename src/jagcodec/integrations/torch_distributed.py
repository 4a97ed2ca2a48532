"""Batches between the ranks of a `torch.distributed` job.

All ranks first exchange which function each one calls, how large its message is, what it becomes,
and its error if it failed. They do so again when each has allocated memory, and when each has made
its result of the messages, which are blobs: `_Exchange.run` has these steps. On a backend for CPU
tensors (gloo, mpi) messages go from host memory to host memory. With NCCL they are copied to the
current CUDA device and back, which has not run on a GPU.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from jagcodec._arguments import require_flag
from jagcodec._compiling import untraced
from jagcodec.columns.batch import source_in, views_of
from jagcodec.errors import (
    REASONS,
    ArgumentError,
    ArgumentTypeError,
    JagcodecError,
    TransportError,
    TransportTimeoutError,
    WireFormatError,
    brief,
)
from jagcodec.memory.arrays import ByteArray
from jagcodec.memory.blocks import new_block
from jagcodec.memory.plain_types import usable_device
from jagcodec.memory.staging import HostCopies, to_device
from jagcodec.wire.frames import PendingMessage, frame_arrays, write_to
from jagcodec.wire.limits import DEFAULT_LIMITS, Limits, check_blob_size, usable_limits
from jagcodec.wire.many.joined import join_rows
from jagcodec.wire.read.any_batch import AnyBatch, concat_in_memory, is_message
from jagcodec.wire.read.decoder import build
from jagcodec.wire.read.message import Message, Reading
from jagcodec.wire.read.opening import open_message
from jagcodec.wire.read.wire_batch import WireBatch, batch_of_message
from jagcodec.wire.write.encoder import encode

if not dist.is_available():
    raise ModuleNotFoundError(
        "jagcodec.integrations.torch_distributed needs a torch built with torch.distributed: "
        "pip install torch",
        name="torch.distributed",
    )

__all__ = ["all_gather_rows", "broadcast"]


@untraced
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
    """Broadcast one rank's batch to every rank of a group, where it is of the same kind.

    Example:
        >>> import torch.distributed as dist
        >>> from jagcodec import encode_rows
        >>> from jagcodec.integrations.torch_distributed import broadcast
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> broadcast({"step": 3}, src=0)
        {'step': 3}
        >>> frames = encode_rows([{"ids": [1, 2]}, {"ids": [3]}], meta={"step": 3})
        >>> broadcast(frames, src=0), broadcast(frames, src=0).meta
        (WireBatch(fields=['ids'], batch_size=[2]), {'step': 3})
        >>> dist.destroy_process_group()

    Args:
        batch: None on every rank but `src`. There it is the message of a batch (its frames or its
            blob), which is sent as it is; a `WireBatch`; or any other value that `encode` accepts,
            such as a TensorDict, a dict or a `BatchedDataDict`. A message is known by its magic.
        src: The global rank that has the batch, as for `torch.distributed.broadcast`.
        group: The participating ranks, by default all. Each of them must make this call.
        device: Where to put tensors on this rank; by default the CPU.
        allow_pickle: As for `encode` and `decode`; the same value on every rank.
        default: As for `encode`.
        limits: As for `decode`. They are checked before memory is allocated.

    Returns:
        A message or a `WireBatch` is a new `WireBatch` on every rank, `src` too, with the same
        columns, rows and `meta`. It owns its memory: this rank's copy of the message that was sent.
        Any other value has its type on every rank, and owns its memory; on rank `src`, unless you
        pass `device` or `default`, it is the object that was passed.

    Raises:
        WireFormatError: The message cannot be read, or not within the limits of a rank. All ranks
            raise the same error, which names the rank that sent it.
        TransportError: Another rank failed (the error names it, and repeats its error), or the
            connection to a rank was lost.
        TransportTimeoutError: The group's time-out passed; its ranks are out of step.
        ArgumentError: Ranks made different calls (every rank raises), a rank other than `src`
            passed a batch, or an argument is invalid.
        UnsupportedTypeError: As `encode`, on rank `src`.
    """
    exchange = _Exchange("broadcast", group, device, allow_pickle, limits)

    def prepare() -> torch.Tensor | None:
        return exchange.encode(batch, default) if exchange.is_source(src, batch) else None

    def finish(messages: list[tuple[int, Message]]) -> Any:
        ((place, message),) = messages
        unchanged = device is None and default is None and not exchange.becomes_open_batch[place]
        return batch if unchanged and place == exchange.place else exchange.read(place, message)

    return exchange.run(src, prepare, finish)


@untraced
def all_gather_rows(
    batch: AnyBatch,
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

    The batches are TensorDicts, `BatchedDataDict`s, dicts of columns, or `WireBatch`es and messages
    (frames or a blob), of the same kind and with the same columns on all ranks, and any number of
    rows, including zero. The other arguments are those of `broadcast`.

    Returns:
        ``concat_rows`` of all batches, of their kind, in new memory. `WireBatch`es and messages
        become a `WireBatch` over the received messages. Its `meta`, as the `meta_info` of
        `BatchedDataDict`s, has the values that all ranks agree on. Raises as `broadcast`; if the
        batches do not fit together, every rank raises the same error, which names column and rank.
    """
    exchange = _Exchange("all_gather_rows", group, device, allow_pickle, limits)

    def finish(messages: list[tuple[int, Message]]) -> Any:
        return exchange.join([exchange.read(*message) for message in messages])

    return exchange.run(None, lambda: exchange.encode(batch, default), finish)


_NAMES = ("broadcast", "all_gather_rows")


class _Report(NamedTuple):
    """What a rank tells the others: its call, its message, and its failure if it failed.

    `_REPORT` makes bytes of the fields, in this order; texts that are too long are cut.
    """

    function: int
    src: int
    size: int  # bytes of the message
    detail: bytes  # the text of the failure; empty without a failure
    becomes_open_batch: int  # 1 if the message becomes a `WireBatch`, otherwise 0
    allow_pickle: int
    reason: bytes  # of a WireFormatError, which all ranks raise; empty for other failures
    path: bytes  # of the WireFormatError

    def call(self) -> str:
        """The call, as a caller writes it; the same on all ranks."""
        src = [f"src={self.src}"] if self.src >= 0 else []
        pickle = ["allow_pickle=True"] if self.allow_pickle else []
        return f"{_NAMES[self.function]}({', '.join(src + pickle)})"


_REPORT = struct.Struct("<qqq1000sqq32s800s")


class _Exchange:
    """One call of `broadcast` or `all_gather_rows` by this rank, with the ranks of a group.

    A *place* is the number of a rank in the group, from 0 on: lists with an item for each rank are
    in this order. A *rank* is its global number, which callers pass and errors name; ``ranks`` has
    the rank at each place.
    """

    def __init__(
        self, where: str, group: Any, device: Any, allow_pickle: bool, limits: Limits | None
    ) -> None:
        self.where, self.group, self.device = where, group, device
        self.allow_pickle = allow_pickle
        self.limits = DEFAULT_LIMITS if limits is None else limits
        outside: Any = dist.GroupMember.NON_GROUP_MEMBER
        # Check the type first: torch calls methods of any object, which may end the process.
        if not (group is None or group is outside or isinstance(group, dist.ProcessGroup)):
            detail = f"expected a process group of this job, or None, found {brief(group)}"
            raise ArgumentTypeError("bad_type", f"{where}(group)", detail)
        try:
            self.place = dist.get_rank(group)  # of this rank
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
        # Older versions of torch do not accept None, for all ranks, here.
        self.ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        self.carrier = torch.device("cpu")  # holds the bytes that the backend transfers
        if "cpu" not in backends:
            self.carrier = torch.device("cuda", torch.cuda.current_device())
        self.size = 0  # bytes of this rank's message
        # By place: whether the message of a rank becomes a `WireBatch`.
        self.becomes_open_batch = [False] * len(self.ranks)

    def run(
        self,
        src: int | None,
        prepare: Callable[[], torch.Tensor | None],
        finish: Callable[[list[tuple[int, Message]]], Any],
    ) -> Any:
        """The result of `finish` for the message of rank `src`, or for the messages of all ranks.

        `prepare` returns the message of this rank, or None. `finish` gets each message with the
        place of its sender. It is the last step that can fail, and so the last that the ranks agree
        on.
        """

        def check_and_prepare() -> torch.Tensor | None:
            usable_device(self.device, f"{self.where}(device)")
            usable_limits(self.limits, f"{self.where}(limits)")
            self.allow_pickle = require_flag(self.allow_pickle, f"{self.where}(allow_pickle)")
            blob = prepare()
            self.size = 0 if blob is None else len(blob)
            return blob

        own_blob, reports = self._agree(src, check_and_prepare)
        self.becomes_open_batch = [bool(report.becomes_open_batch) for report in reports]
        sizes = [report.size for report in reports]
        places = range(len(self.ranks)) if src is None else [self.ranks.index(src)]
        blobs, _ = self._agree(
            src, lambda: [(i, self._allocate(i, sizes[i], own_blob)) for i in places]
        )
        blobs_on_host = self._broadcast(blobs)

        def open_and_finish() -> Any:
            return finish([*map(self._open, places, blobs_on_host)])

        return self._agree(src, open_and_finish)[0]

    def _open(self, place: int, blob: torch.Tensor) -> tuple[int, Message]:
        """The place of a sender, and its message, which is in this blob."""
        device = usable_device(self.device, self.where)
        with self._naming_sender(place):
            value_by_value = self.becomes_open_batch[place]
            how = Reading(self.limits, None, device, self.allow_pickle, value_by_value)
            return place, open_message(blob.numpy(), "message", how)

    def _allocate(self, place: int, size: int, own_blob: torch.Tensor | None) -> torch.Tensor:
        """Memory on the carrier for a message to receive; for this rank's own, its memory."""
        # Check this rank's own message too: all ranks name the same message.
        check_blob_size(size, self.limits, f"{self._origin(place)}: header")
        if own_blob is not None and place == self.place:
            return own_blob
        try:
            if self.carrier.type != "cpu":
                return torch.empty(size, dtype=torch.uint8, device=self.carrier)
            return torch.from_numpy(new_block(size).data)
        except (MemoryError, ValueError, OverflowError, torch.OutOfMemoryError) as error:
            detail = f"expected a message that fits into memory, found {size} bytes: {error!s:.200}"
            raise self._peer_failed(place, detail) from error

    # What the ranks send each other

    def _agree(self, src: int | None, step: Callable[[], Any]) -> tuple[Any, list[_Report]]:
        """Run a step; return its result, and the reports of all ranks. If one failed, all raise.

        They raise the WireFormatError of the first rank that failed. Any other error is raised
        where it happened, and the other ranks raise a TransportError that repeats its text.
        """
        failure: Exception | None = None
        result = None
        try:
            result = step()
        except Exception as error:
            failure = error
        records = self._gather_records(_REPORT.pack(*self._own_report(src, failure)))
        reports = [_Report(*_REPORT.unpack(record)) for record in records]
        for place, report in enumerate(reports):
            numbers = report.function, report.size, report.becomes_open_batch
            is_known = 0 <= report.function < len(_NAMES)
            if not is_known or report.size < 0 or report.becomes_open_batch not in (0, 1):
                detail = f"expected numbers of this function, found {', '.join(map(str, numbers))}"
                raise self._peer_failed(place, f"{detail}; install one version on every rank")
            if report.detail.rstrip(b"\0"):
                self._raise_failure(place, report, failure)
        calls = [report.call() for report in reports]
        if any(call != calls[0] for call in calls):
            each_call = ", ".join(
                f"{call} on rank {rank}" for call, rank in zip(calls, self.ranks, strict=True)
            )
            detail = f"expected the same call on every rank, found {each_call}"
            raise ArgumentError("conflict", self.where, detail)
        return result, reports

    def _own_report(self, src: int | None, failure: Exception | None) -> _Report:
        """The report of this rank."""
        detail, reason, path = "", "", ""
        if isinstance(failure, WireFormatError):
            detail, reason, path = failure.detail, failure.reason, failure.path
        elif failure is not None:
            detail = f"{type(failure).__name__}: {failure}"
        return _Report(
            function=_NAMES.index(self.where),
            src=src if src is not None and self._is_rank(src) else -1,
            size=self.size,
            detail=detail.encode(errors="replace"),
            becomes_open_batch=self.becomes_open_batch[self.place],
            allow_pickle=self.allow_pickle is True,
            reason=reason.encode(errors="replace"),
            path=path.encode(errors="replace"),
        )

    def _raise_failure(self, place: int, report: _Report, failure: Exception | None) -> NoReturn:
        """Raise the failure of the rank at this place; all ranks raise the same WireFormatError."""
        texts = report.detail, report.reason, report.path
        detail, reason, path = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
        if reason in REASONS:
            kind: Any = reason
            raise WireFormatError(kind, path, detail) from failure
        raise failure or self._peer_failed(place, f"expected it to take part, found {detail}")

    def _gather_records(self, record: bytes) -> list[bytes]:
        """The reports of all ranks as bytes, of which `record` is the report of this rank."""
        mine = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(self.carrier)
        records = [torch.empty_like(mine) for _ in self.ranks]
        with self._backend_errors():
            dist.all_gather(records, mine, group=self.group)
        return [each.cpu().numpy().tobytes() for each in records]

    def _broadcast(self, blobs: Sequence[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
        """Send the blob of each place to every rank, and return all of them on the host.

        On other ranks, the tensor of a place is memory of the same size, which is overwritten.
        """
        on_carrier = [(self.ranks[place], to_device(blob, self.carrier)) for place, blob in blobs]
        with self._backend_errors():
            works = [
                dist.broadcast(blob, rank, self.group, async_op=True)
                for rank, blob in on_carrier
                if blob.numel()
            ]
            for work in works:
                work.wait()
        targets = [blob for _, blob in blobs]  # this rank's own is on the host already
        copies = HostCopies(independent=True)
        copies.fetch(targets)
        return [copies.of(blob) for blob in targets]

    # Steps of `broadcast` and `all_gather_rows`

    def is_source(self, src: Any, batch: Any) -> bool:
        """Whether this rank is the one that sends."""
        this_rank = self.ranks[self.place]
        if not self._is_rank(src):
            detail = f"expected a global rank of the group, one of {self.ranks}, found {brief(src)}"
            raise ArgumentError("bad_option", f"{self.where}(src)", detail)
        if src != this_rank and batch is not None:
            detail = f"expected None on every rank but src={src}, found {type(batch).__name__} "
            detail += f"on rank {this_rank}"
            raise ArgumentError("conflict", f"{self.where}(batch)", detail)
        return bool(src == this_rank)

    def _is_rank(self, src: Any) -> bool:
        # A bool is an Integral too, and 1.0 is in [1].
        return isinstance(src, Integral) and not isinstance(src, bool) and src in self.ranks

    def encode(self, batch: Any, default: Callable[[Any], Any] | None) -> torch.Tensor:
        """A batch as a message in one blob. The bytes of a message are not changed."""
        blobs: list[ByteArray] = []

        def make_room(size: int) -> ByteArray:
            blobs.append(new_block(size).data)
            return blobs[0]

        self.becomes_open_batch[self.place] = isinstance(batch, WireBatch) or is_message(batch)
        with self._naming_sender(self.place):
            frames = self._frames(batch)
            if frames is None:
                encode(batch, out=make_room, allow_pickle=self.allow_pickle, default=default)
            else:
                header, *buffers = frame_arrays(frames, f"{self.where}(batch)")
                write_to(PendingMessage(header.tobytes(), buffers), make_room, self.where)
        return torch.from_numpy(blobs[0])

    def _frames(self, batch: Any) -> Sequence[Any] | None:
        """The frames of a message, or of a `WireBatch` that is all of a message.

        None for any other batch, which must be encoded.
        """
        if not self.becomes_open_batch[self.place]:
            return None
        if isinstance(batch, WireBatch):
            return source_in(batch).frames(batch)
        # Check the frames before they become one blob, in which a frame that was cut would end
        # with zeros.
        how = Reading(
            self.limits, allow_pickle=self.allow_pickle, value_by_value=True, verify=False
        )
        return open_message(batch, f"{self.where}(batch)", how).frames

    def read(self, place: int, message: Message) -> Any:
        """The batch of a message that came from this place."""
        with self._naming_sender(place):
            if self.becomes_open_batch[place]:
                return batch_of_message(message)
            return build(message, message.header.schema.root)

    def join(self, batches: Sequence[Any]) -> Any:
        """The rows of the batches of all ranks, of their kind."""
        kind = type(batches[0])
        for place, batch in enumerate(batches):
            if type(batch) is not kind:
                expected = f"expected a {kind.__name__} like rank {self.ranks[0]}"
                detail = f"{expected}, found {type(batch).__name__}; pass one kind on every rank"
                raise ArgumentTypeError("bad_type", self._origin(place), detail)
        with self._naming_ranks():
            if kind is not WireBatch:
                return concat_in_memory(batches, "concat_rows")
            # A `WireBatch` joins columns when they are read. Whether they can be joined must be
            # known here, where all ranks hear of it: join one row of each batch.
            first_rows = [batch.rows(slice(0, 1)) for batch in batches]
            views_of(join_rows(first_rows, "concat_rows"))
            return join_rows(batches, "concat_rows")

    # Errors

    def _origin(self, place: int) -> str:
        """The name of the rank at a place, for the path of an error."""
        return f"{self.where}, rank {self.ranks[place]}"

    def _peer_failed(self, place: int, detail: str) -> TransportError:
        return TransportError("peer_failed", self._origin(place), detail)

    @contextmanager
    def _naming_sender(self, place: int) -> Iterator[None]:
        """Name the rank that sent a message in errors about the message."""
        try:
            yield
        except WireFormatError as error:
            path = f"{self._origin(place)}: {error.path}"
            raise WireFormatError(error.reason, path, error.detail) from error

    @contextmanager
    def _naming_ranks(self) -> Iterator[None]:
        """Name ranks in errors of a join, which knows batches only by number."""
        try:
            yield
        except JagcodecError as error:
            path = error.path
            for form in (r"message (\d+): (.*)", r"(?=.* of batch (\d+)$)(.*) of batch \d+"):
                match = re.fullmatch(form, path)
                if match:
                    path = f"{self._origin(int(match[1]))}: {match[2]}"
            first = rf"\1 rank {self.ranks[0]}"
            detail = re.sub(r"\b(of|like|in) batch 0\b", first, error.detail)
            raise type(error)(error.reason, path, detail) from error

    @contextmanager
    def _backend_errors(self) -> Iterator[None]:
        """Raise errors of this library for those of backends about lost peers and time-outs."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            is_timeout = any(word in str(error).lower() for word in ("timed out", "timeout"))
            kind = TransportTimeoutError if is_timeout else TransportError
            detail = f"expected every rank to take part, found {error!s:.400}. Messages may be "
            detail += "lost: make the group anew"
            raise kind("timed_out" if is_timeout else "no_peer", self.where, detail) from error
