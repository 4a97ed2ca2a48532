"""A record of batches on disk, for debugging and replay: one file per step, whole or not there.

A record is a directory that one `RecordWriter` writes and any number of `RecordReader`s read:

    step-0000000042.jag    the batch of step 42: its message as a blob, which `load` and `open_wire`
                           take as well, and behind it an entry that says what it is
    lock                   held by the writer; the system releases it when the writer dies
    .step-….part           a step that is being written, or was when its writer was killed

The entry is JSON (step, time, size and SHA-256 of the message, rows, schema, versions, the caller's
metadata), followed by 48 bytes: the SHA-256 of the JSON, its size as a little-endian uint64, and
``jagstep1``. Message and entry are one file, so that there is never one without the other: it is
written under another name, brought to the disk, and renamed. Nothing in a record is pickled.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple, Unpack

import numpy as np
import tensordict
import torch

from jagcodec._arguments import usable_device, whole_number
from jagcodec._version import __version__
from jagcodec.batch.schemas import Schema, document_of, schema_of, schema_of_document
from jagcodec.errors import (
    ArgumentError,
    ArgumentKeyError,
    ArgumentTypeError,
    JagcodecError,
    Reason,
    WireFormatError,
    brief,
    describe,
)
from jagcodec.wire.checks import INT64_MAX
from jagcodec.wire.decoder import decode
from jagcodec.wire.encoder import EncodeOptions, encode
from jagcodec.wire.files import file_path, read_file, replace_file, sync_directory
from jagcodec.wire.frames import blob_pieces
from jagcodec.wire.lazy import WireBatch, open_wire
from jagcodec.wire.limits import DEFAULT_LIMITS, NO_LIMITS, Limits, usable_limits
from jagcodec.wire.message import open_message
from jagcodec.wire.spec import VERSION


class RecordInfo(NamedTuple):
    """What the entry of a step says, without a look at its message.

    Attributes:
        step: Its number.
        written: When, in UTC.
        size: Bytes of its message.
        sha256: Of the message, in hexadecimal.
        rows: N.
        schema: Of its columns.
        versions: Of ``jagcodec``, ``wire`` (the format), ``python``, ``torch``, ``tensordict`` and
            ``numpy``, as the writer had them.
        metadata: What the caller said of the step.
    """

    step: int
    written: datetime
    size: int
    sha256: str
    rows: int
    schema: Schema
    versions: dict[str, str]
    metadata: dict[str, Any]


# --- writing -----------------------------------------------------------------------------------


class RecordWriter:
    """Write the batch of each step to a directory, and keep the newest of them.

    Example:
        >>> import tempfile, torch
        >>> from jagcodec import RecordReader, RecordWriter, pack_rows
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with RecordWriter(directory, keep=2) as writer:
        ...         for step in range(4):
        ...             batch = pack_rows([{"ids": [step, 7]}, {"ids": [9]}])
        ...             info = writer.write(step, batch, metadata={"loss": 0.5})
        ...     reader = RecordReader(directory)
        ...     reader.steps, reader.info(3).metadata, reader.read(3)["ids"].values().tolist()
        ((2, 3), {'loss': 0.5}, [3, 7, 9])

    Args:
        directory: Made if it does not exist; its parent must. It is the record's own. It has to be
            on a file system with locks (`flock`) and renames that are atomic.
        keep: How many steps stay, the newest; None for all of them. An older one is deleted only
            after a newer one is on the disk.

    Raises:
        ArgumentError: Another writer has this record open (reason ``"busy"``), in this process or
            in another; or `keep` is less than 1.
        ArgumentTypeError: `directory` is not a path.
        OSError: The file system says no.

    A killed writer loses the step that it was writing, and no other: what it left behind is not
    seen by readers, and is removed by the next writer. Close the writer, or use it in ``with``. It
    may be shared by threads; a process that was forked from the writer's cannot write.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int | None = None) -> None:
        where = "RecordWriter(directory)"
        name = _directory_of(directory, where)
        self._keep = None if keep is None else whole_number(keep, 1, "RecordWriter(keep)")
        self._directory = name
        self._process = os.getpid()
        self._writing = threading.Lock()
        with suppress(FileExistsError):
            os.mkdir(name)
            _make_durable(os.path.dirname(os.path.abspath(name)))
        self._lock = open(os.path.join(name, "lock"), "ab")  # noqa: SIM115 - until close()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # What writers left that were killed; those that live hold the lock.
            for file in os.listdir(name):
                left = os.path.join(name, file)
                if _PART.fullmatch(file) and not os.path.isdir(left):
                    os.unlink(left)
        except BlockingIOError as error:
            self._lock.close()
            raise ArgumentError(
                "busy",
                where,
                f"expected a record that no writer has open, found that one has {brief(name)}; "
                "close it, or end its process",
            ) from error
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another writer have the record. Every step that was written is there already."""
        if not self._lock.closed:
            # Processes that were forked from this one may still have the file open.
            if self._process == os.getpid():
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()

    def write(
        self,
        step: int,
        batch: Any,
        *,
        metadata: Mapping[str, Any] | None = None,
        **options: Unpack[EncodeOptions],
    ) -> RecordInfo:
        """Write a step: when this returns, it is on the disk, and what is no longer kept is not.

        Args:
            step: Above all steps of the record; see `rewind`.
            batch: What `open_wire` reads the message of: a TensorDict, a `BatchedDataDict`, a dict
                with one TensorDict in it, or a `WireBatch`. A message (frames or a blob) is
                written as it came. It must not be written to in the meantime.
            metadata: What is to be said of the step: a mapping that JSON gives back as it is. It is
                read without a look at the message; what belongs to the batch wherever it goes is
                `meta` of `encode`.
            options: Those of `encode` but `allow_pickle`; none with a message. With
                ``checksum=True`` the message has a checksum of each buffer beside the SHA-256.

        Raises:
            ArgumentError: There is such a step or a newer one (reason ``"conflict"``); the writer
                is closed, or of another process; an option does not go with `batch`; or `metadata`
                would come back as something else.
            ArgumentTypeError: `batch` is no batch, or `metadata` no mapping.
            UnsupportedTypeError: As `encode`.
            WireFormatError: `batch` is a message that cannot be read.
            OSError: The file system says no. The step may be there all the same if what failed is
                to bring its name to the disk; no step was deleted.
        """
        where = "RecordWriter.write"
        number = whole_number(step, 0, f"{where}(step)")
        if number > INT64_MAX:
            found = brief(number)
            raise ArgumentError(
                "bad_option", f"{where}(step)", f"expected less than 2**63, found {found}"
            )
        said = _usable_metadata(metadata, f"{where}(metadata)")
        with self._writing:
            self._check_open(where)
            steps = _steps_in(self._directory)
            if steps and number <= steps[-1]:
                raise ArgumentError(
                    "conflict",
                    f"{where}(step)",
                    f"expected a step above {steps[-1]}, the newest of the record, found {number}; "
                    "rewind(step) deletes that step and those after it",
                )
            pieces, info = _message_of(number, batch, said, options, where)
            file = _file_name(number)
            path = os.path.join(self._directory, file)
            temporary = os.path.join(self._directory, f".{file.removesuffix('.jag')}.part")
            replace_file(temporary, path, [*pieces, _entry_of(info)])
            _make_durable(self._directory)
            for old in [] if self._keep is None else [*steps, number][: -self._keep]:
                self._delete(old)
        return info

    def rewind(self, step: int) -> None:
        """Delete this step and all after it, for a run that goes on from an earlier checkpoint.

        The newest goes first: whenever the process is killed, what is left has no gaps. Steps that
        are not kept any more do not come back.

        Raises:
            ArgumentError: The writer is closed, or of another process; or `step` is negative.
            OSError: The file system says no.
        """
        where = "RecordWriter.rewind"
        first = whole_number(step, 0, f"{where}(step)")
        with self._writing:
            self._check_open(where)
            for number in reversed(_steps_in(self._directory)):
                if number >= first:
                    self._delete(number)
            _make_durable(self._directory)

    def _check_open(self, where: str) -> None:
        if self._lock.closed or self._process != os.getpid():
            found = "a closed one" if self._lock.closed else "one of the process it was forked from"
            raise ArgumentError(
                "busy", where, f"expected an open writer of this process, found {found}"
            )

    def _delete(self, step: int) -> None:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self._directory, _file_name(step)))


def _message_of(
    step: int, batch: Any, metadata: dict[str, Any], options: EncodeOptions, where: str
) -> tuple[list[Any], RecordInfo]:
    """The blob of a step in pieces, and what is to be said of it."""
    encoded = isinstance(batch, (WireBatch, *_MESSAGES))
    if encoded and options:
        raise ArgumentError(
            "bad_option",
            f"{where}({next(iter(options))})",
            "expected no options with a message, which is encoded already, found one",
        )
    if options.get("allow_pickle"):
        raise ArgumentError(
            "bad_option",
            f"{where}(allow_pickle)",
            "expected False, found True: records hold no pickles; register_type makes encode take "
            "types of yours",
        )
    if isinstance(batch, WireBatch):
        frames: list[Any] = batch.to_frames()
    elif encoded:
        found = open_message(batch, f"{where}(batch)", by_range=True, verify=False)
        frames = list(found.frames or ())
    else:
        frames = encode(batch, **options)
    try:
        opened = open_wire(frames, limits=NO_LIMITS)
        schema = schema_of(opened)
    except WireFormatError as error:
        if encoded:
            raise
        raise ArgumentTypeError(
            "bad_type",
            f"{where}(batch)",
            "expected a TensorDict with a batch dim, a BatchedDataDict with a tensor, or a dict "
            f"with one TensorDict in it, found {describe(batch)}; pack_rows and "
            "pack_jagged_fields make TensorDicts",
        ) from error
    pieces = blob_pieces([memoryview(frame) for frame in frames])
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    size = sum(memoryview(piece).nbytes for piece in pieces)
    return pieces, RecordInfo(
        step=step,
        written=datetime.now(UTC),
        size=size,
        sha256=digest.hexdigest(),
        rows=len(opened),
        schema=schema,
        versions={
            "jagcodec": __version__,
            "wire": str(VERSION),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "tensordict": str(tensordict.__version__),
            "numpy": np.__version__,
        },
        metadata=metadata,
    )


_MESSAGES = (list, tuple, bytes, bytearray, memoryview, np.ndarray, torch.Tensor)


def _usable_metadata(metadata: Any, path: str) -> dict[str, Any]:
    """The metadata as JSON gives it back."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        found = describe(metadata)
        raise ArgumentTypeError("bad_type", path, f"expected a mapping, found {found}")
    given = dict(metadata)
    try:
        back: dict[str, Any] = json.loads(json.dumps(given, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            "bad_option", path, f"expected values of JSON, found some that are none: {error}"
        ) from error
    if back != given:
        raise ArgumentError(
            "bad_option",
            path,
            "expected values that JSON gives back as they are, found others, such as tuples or "
            "keys that are no strings; make them lists and strings",
        )
    return back


def _make_durable(directory: str) -> None:
    """Bring the names in a directory to the disk, on file systems that can."""
    try:
        sync_directory(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


# --- reading -----------------------------------------------------------------------------------


class RecordReader:
    """Read the steps of a record, also while they are written.

    ``len(reader)`` is how many steps there are now, ``step in reader`` whether this is one of them,
    and iteration gives their numbers, oldest first, those that were there when it began.

    Example:
        >>> import tempfile, torch
        >>> from jagcodec import RecordReader, RecordWriter, pack_rows
        >>> batch = pack_rows([{"ids": [1, 2], "x": 0.5}, {"ids": [3], "x": 1.0}])
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with RecordWriter(directory) as writer:
        ...         info = writer.write(7, batch)
        ...     reader = RecordReader(directory)
        ...     part = reader.open(7).select(["ids"]).rows([1])
        ...     print(list(reader), reader.info(7).rows, part["ids"].values())
        ...     print(reader.schema(7))
        [7] 2 tensor([3])
        column  kind    dtype    shape
        ids     jagged  int64    (N, *)
        x       tensor  float32  (N)

    Args:
        directory: That of a `RecordWriter`, which need not be open.
        limits: As for `decode`, of each step.

    Raises:
        ArgumentTypeError: `directory` is not a path, or `limits` are not `Limits`.
        FileNotFoundError: There is no such directory.
        NotADirectoryError: It is a file.

    Every method that takes a step raises `ArgumentKeyError` where there is none of this number, be
    it that it was deleted or never written, and `WireFormatError` where its file is damaged. What a
    step returned stays valid when the step is deleted.
    """

    def __init__(self, directory: str | os.PathLike[str], *, limits: Limits | None = None) -> None:
        where = "RecordReader(directory)"
        self._directory = _directory_of(directory, where)
        self._limits = (
            DEFAULT_LIMITS if limits is None else usable_limits(limits, "RecordReader(limits)")
        )
        _steps_in(self._directory)

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the steps that are there now, oldest first."""
        return tuple(_steps_in(self._directory))

    def __repr__(self) -> str:
        return f"RecordReader({self._directory!r})"

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __contains__(self, step: object) -> bool:
        return step in self.steps

    def info(self, step: int) -> RecordInfo:
        """What the entry of a step says; its message is not looked at."""
        return self._mapped(step, "info")[1]

    def schema(self, step: int) -> Schema:
        """The schema of a step's batch; its message is not looked at."""
        return self.info(step).schema

    def open(self, step: int, *, device: torch.device | str | None = None) -> WireBatch:
        """The batch of a step as `open_wire` opens it: rows and columns are read as they are asked
        for, out of the file, which is mapped.

        The SHA-256 is not verified, which would read everything: `verify` does. If the step was
        written with ``checksum=True``, that of the header is.

        Args:
            step: Its number.
            device: As for `decode`.

        Raises:
            ArgumentKeyError: There is no such step.
            WireFormatError: Its file is damaged.
        """
        target = usable_device(device, "RecordReader.open(device)")
        data, info = self._mapped(step, "open")
        with _errors_of(step):
            return open_wire(data[: info.size], device=target, limits=self._limits)

    def read(self, step: int, *, device: torch.device | str | None = None) -> Any:
        """The batch of a step, read whole: what `decode` makes of its message.

        The SHA-256 is verified before anything is made of it. The memory is new, and the caller's.

        Args:
            step: Its number.
            device: As for `decode`.

        Raises:
            ArgumentKeyError: There is no such step.
            WireFormatError: Its file is damaged.
        """
        target = usable_device(device, "RecordReader.read(device)")
        data, info = self._file(step, "read", mmap=False)
        with _errors_of(step):
            _check_sha256(data[: info.size], info.sha256)
            return decode(data[: info.size], device=target, limits=self._limits)

    def verify(self, step: int) -> None:
        """Compare the message of a step with its SHA-256.

        Raises:
            ArgumentKeyError: There is no such step.
            WireFormatError: It is another (reason ``"bad_checksum"``), or its file is damaged
                otherwise.
        """
        data, info = self._mapped(step, "verify")
        with _errors_of(step):
            _check_sha256(data[: info.size], info.sha256)

    def _mapped(self, step: int, where: str) -> tuple[memoryview, RecordInfo]:
        return self._file(step, where, mmap=True)

    def _file(self, step: int, where: str, *, mmap: bool) -> tuple[memoryview, RecordInfo]:
        path = f"RecordReader.{where}(step)"
        number = whole_number(step, 0, path)
        try:
            if number > INT64_MAX:  # which may be too long for the name of a file
                raise FileNotFoundError
            with _errors_of(number):
                name = os.path.join(self._directory, _file_name(number))
                data = memoryview(read_file(name, path, self._limits, mmap=mmap))
                return data, _info_of(data, number)
        except FileNotFoundError as error:
            steps = self.steps
            there = f"one of {len(steps)} from {steps[0]} to {steps[-1]}" if steps else "a step"
            raise ArgumentKeyError(
                "no_such_key",
                path,
                f"expected {there}, found {brief(number)}, which was deleted or never written",
            ) from error


@contextmanager
def _errors_of(step: int) -> Iterator[None]:
    try:
        yield
    except WireFormatError as error:
        path = f"step {step}: {error.path}"
        raise WireFormatError(error.reason, path, error.detail) from error


def _check_sha256(data: memoryview, expected: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise WireFormatError(
            "bad_checksum",
            "message",
            f"expected the SHA-256 {expected}, found {found}; the file was damaged",
        )


# --- files -------------------------------------------------------------------------------------

_STEP = re.compile(r"step-([0-9]{10,19})\.jag")
_PART = re.compile(r"\.step-[0-9]{10,19}\.part")


def _directory_of(directory: Any, where: str) -> str:
    """The directory of a record, which stays the same one if the process goes to another."""
    name = file_path(directory, where, "pass the directory of the record")
    return os.path.join(os.getcwd(), name) if name else name


def _file_name(step: int) -> str:
    return f"step-{step:010d}.jag"


def _steps_in(directory: str) -> list[int]:
    """The steps of a record, oldest first."""
    with os.scandir(directory) as entries:
        found = [_STEP.fullmatch(entry.name) for entry in entries if not entry.is_dir()]
    steps = [(int(match[1]), match[0]) for match in found if match]
    return sorted(step for step, name in steps if _file_name(step) == name)


_END = struct.Struct("<32sQ8s")
_MAGIC = b"jagstep1"


def _entry_of(info: RecordInfo) -> bytes:
    """The entry of a step, which its file ends with."""
    document = {
        **info._asdict(),
        "written": info.written.isoformat(),
        "schema": document_of(info.schema),
    }
    data = json.dumps(document).encode()
    return data + _END.pack(hashlib.sha256(data).digest(), len(data), _MAGIC)


def _info_of(data: memoryview, step: int) -> RecordInfo:
    """What the end of a step's file says.

    Raises:
        WireFormatError: It is cut, damaged, or that of another step.
    """
    if len(data) < _END.size:
        raise _damaged("frame_size", f"{_END.size} bytes or more", f"{len(data)}")
    digest, size, magic = _END.unpack(data[-_END.size :])
    if magic != _MAGIC:
        raise _damaged("frame_size", f"{_MAGIC!r} at the end of the file", repr(magic))
    end = len(data) - _END.size
    if size > end:
        raise _damaged("out_of_bounds", f"at most {end} bytes", f"{size}")
    text = bytes(data[end - size : end])
    if hashlib.sha256(text).digest() != digest:
        raise _damaged("bad_checksum", "the SHA-256 of its JSON", "another")
    try:
        document = json.loads(text)
        written = datetime.fromisoformat(document["written"])
        schema = schema_of_document(document["schema"], "schema")
        info = RecordInfo(**{**document, "written": written, "schema": schema})
    except JagcodecError as error:
        raise WireFormatError(error.reason, f"entry: {error.path}", error.detail) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _damaged("bad_header", "JSON of what a step says", f"none: {error}") from error
    kinds = (int, datetime, int, str, int, Schema, dict, dict)
    if not all(type(value) is kind for value, kind in zip(info, kinds, strict=True)):
        raise _damaged("bad_header", "values of their types", "others")
    if info.step != step:
        raise _damaged("bad_value", f"step {step}, as the file is named", f"step {info.step}")
    if info.size != end - size:
        raise _damaged("frame_size", f"a message of {info.size} bytes", f"one of {end - size}")
    return info


def _damaged(reason: Reason, expected: str, found: str) -> WireFormatError:
    return WireFormatError(reason, "entry", f"expected {expected}, found {found}")
