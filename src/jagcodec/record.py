"""`RecordWriter`, `RecordReader`: a directory with one message per step.

One `RecordWriter` writes it, and any number of `RecordReader`s read it:

    step-0000000042.jag    the batch of step 42, as `dump` writes it and `load` and `open_wire` read
    lock                   locked by the writer; the system releases it when the writer dies
    .….part                a step that is being written, or that a killed writer did not finish
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from contextlib import suppress
from typing import Any, Unpack

from jagcodec._arguments import require_int
from jagcodec._compiling import untraced
from jagcodec.errors import ArgumentError, ArgumentTypeError, WireFormatError, brief, describe
from jagcodec.wire.blobs import refuse_frames
from jagcodec.wire.files import file_path, write_file
from jagcodec.wire.limits import NO_LIMITS
from jagcodec.wire.read.wire_batch import open_wire
from jagcodec.wire.write.encoder import EncodeOptions, encode


@untraced
class RecordWriter:
    """Write the batch of each step to a directory, and keep the newest of them.

    Example:
        >>> import tempfile
        >>> from jagcodec import load, pack_rows
        >>> from jagcodec.record import RecordReader, RecordWriter
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with RecordWriter(directory, keep=2) as writer:
        ...         for step in range(4):
        ...             batch = pack_rows([{"ids": [step, 7]}, {"ids": [9]}])
        ...             writer.write(step, batch, meta={"loss": 0.5})
        ...     reader = RecordReader(directory)
        ...     reader.steps, load(reader.file(3))["ids"].values().tolist()
        ((2, 3), [3, 7, 9])

    Args:
        directory: It is created if it does not exist; its parent must exist. Nothing else should
            write to it. Its file system needs locks (`flock`) and renames that are atomic.
        keep: How many steps stay, the newest; None for all of them. An older one is deleted only
            after a newer one is on the disk.

    Raises:
        ArgumentError: Another writer has this record open (reason ``"busy"``); or `keep` is less
            than 1.

    If a writer is killed, only the step that it was writing is lost; readers do not see what is
    left of it. Close the writer, or use it in ``with``. Threads may share it. A process that was
    forked from the writer's cannot write.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int | None = None) -> None:
        where = "RecordWriter(directory)"
        self._directory = name = _directory_of(directory, where)
        self._keep = None if keep is None else require_int(keep, 1, "RecordWriter(keep)")
        self._process = os.getpid()
        self._writing = threading.Lock()
        with suppress(FileExistsError):
            os.mkdir(name)
        self._lock = open(os.path.join(name, "lock"), "ab")  # noqa: SIM115 - until close()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # No other writer lives, because it would hold the lock: delete what killed ones left.
            for file in os.listdir(name):
                path = os.path.join(name, file)
                if _PART.fullmatch(file) and os.path.isfile(path):
                    os.unlink(path)
        except BaseException as error:
            self._lock.close()
            if not isinstance(error, BlockingIOError):
                raise
            detail = f"expected a record that no writer has open, found {brief(name)} in use"
            raise ArgumentError("busy", where, f"{detail}; close its writer") from error

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

    def write(self, step: int, batch: Any, **options: Unpack[EncodeOptions]) -> None:
        """Write a step, as `dump` does, and then delete the oldest one if it is not kept.

        Args:
            step: Above all steps of the record; see `rewind`.
            batch: A batch as `open_wire` reads it: a TensorDict, a `BatchedDataDict`, a dict with
                one TensorDict in it, or a `WireBatch`, such as ``open_wire(frames)``.
            options: The options of `encode`, such as `meta`. `checksum` is True unless you pass it.

        Raises:
            ArgumentError: The record has this step or a newer one (reason ``"conflict"``), or the
                writer is closed, or belongs to another process (``"busy"``); or as from `encode`.
            OSError: The file system failed; no step was deleted.
        """
        where = "RecordWriter.write"
        number = require_int(step, 0, f"{where}(step)")
        with self._writing:
            steps = self._steps(where)
            if steps and number <= steps[-1]:
                detail = f"expected a step above {steps[-1]}, the newest, found {number}; rewind"
                raise ArgumentError("conflict", f"{where}(step)", f"{detail}(step) deletes steps")
            frames = _frames_of(batch, {"checksum": True, **options}, f"{where}(batch)")
            write_file(_file_of(self._directory, number), frames, where)
            if self._keep is not None:
                self._delete([*steps, number][: -self._keep])

    def rewind(self, step: int) -> None:
        """Delete this step and all after it, for a run that goes on from an earlier checkpoint.

        The newest goes first: whenever the process is killed, the steps that are left have no
        gaps. Steps that were deleted before, because they are not kept, do not come back. Raises
        `ArgumentError` if the writer is closed or belongs to another process, or if `step` is
        negative.
        """
        where = "RecordWriter.rewind"
        first = require_int(step, 0, f"{where}(step)")
        with self._writing:
            self._delete([n for n in reversed(self._steps(where)) if n >= first])

    def _steps(self, where: str) -> list[int]:
        """The steps of the record; an error if this writer may not write."""
        if self._lock.closed or self._process != os.getpid():
            other = "a closed one" if self._lock.closed else "one of the process it was forked from"
            detail = f"expected an open writer of this process, found {other}"
            raise ArgumentError("busy", where, detail)
        return _steps_in(self._directory)

    def _delete(self, steps: list[int]) -> None:
        """Delete the files of steps, in this order."""
        for step in steps:
            with suppress(FileNotFoundError):
                os.unlink(_file_of(self._directory, step))


def _frames_of(batch: Any, options: EncodeOptions, where: str) -> list[Any]:
    """The message of a step; an error if `open_wire` could not read it as a batch."""
    refuse_frames(batch, where)
    frames = encode(batch, **options)
    try:
        open_wire(frames, limits=NO_LIMITS)
    except WireFormatError as error:
        detail = "expected a TensorDict with a batch dim, a BatchedDataDict with a tensor, a dict "
        detail += f"with one TensorDict, or a WireBatch (open_wire), found {describe(batch)}"
        raise ArgumentTypeError("bad_type", where, detail) from error
    return frames


@untraced
class RecordReader:
    """List the steps of a record and name their files, also while they are written.

    Example:
        >>> import tempfile
        >>> from jagcodec import open_wire, pack_rows
        >>> from jagcodec.record import RecordReader, RecordWriter
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with RecordWriter(directory) as writer:
        ...         writer.write(7, pack_rows([{"ids": [1, 2]}, {"ids": [3]}]))
        ...     reader = RecordReader(directory)
        ...     reader.steps, open_wire(reader.file(7)).rows([1])["ids"].values().tolist()
        ((7,), [3])

    `load` reads a step whole and compares all checksums. `open_wire` maps it and reads columns when
    they are asked for; the batch stays valid when its step is deleted. Both raise
    FileNotFoundError for a step that is not there.

    Args:
        directory: The directory of a `RecordWriter`, which need not be open.

    Raises:
        OSError: It is not a directory.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = _directory_of(directory, "RecordReader(directory)")
        _steps_in(self._directory)

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the steps that are there now, oldest first."""
        return tuple(_steps_in(self._directory))

    def file(self, step: int) -> str:
        """The path of a step's file, whether or not it is there."""
        return _file_of(self._directory, require_int(step, 0, "RecordReader.file(step)"))


def _directory_of(directory: Any, where: str) -> str:
    """The absolute path of a record, which stays right if the process changes its directory."""
    name = file_path(directory, where, "pass the directory of the record")
    return os.path.join(os.getcwd(), name) if name else name


_STEP = re.compile(r"step-([0-9]{10}|[1-9][0-9]{10,18})\.jag")
_PART = re.compile(r"\.[0-9a-f]{16}\.part")  # as `dump` names it


def _file_of(directory: str, step: int) -> str:
    """The path of the file of a step."""
    return os.path.join(directory, f"step-{step:010d}.jag")


def _steps_in(directory: str) -> list[int]:
    """The numbers of the steps in a directory, sorted."""
    with os.scandir(directory) as entries:
        matches = [_STEP.fullmatch(entry.name) for entry in entries if not entry.is_dir()]
    return sorted(int(match[1]) for match in matches if match)
