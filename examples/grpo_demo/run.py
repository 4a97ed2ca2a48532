"""The two processes: started fresh, connected, awaited, and ended whatever happens."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

from examples.grpo_demo.producer import produce
from examples.grpo_demo.report import DemoResult, settle
from examples.grpo_demo.trainer import consume
from jagcodec import JagcodecError
from jagcodec.data import rollout_table
from jagcodec.errors import TransportTimeoutError

ROWS = 512
BATCHES = 2
TIMEOUT = 120.0
_HOST = "tcp://127.0.0.1"
_GRACE = 5.0
"""Seconds that a process has to end after its last report."""

# Fresh interpreters: after a fork the trainer would hold the producer's batch already.
_SPAWN = get_context("spawn")


def intro() -> str:
    """Two lines that say what is about to run, and where the figures are from."""
    table = rollout_table()
    return (
        f"GRPO batches of {ROWS} rollouts, from a producer process to a trainer process, "
        "over ZeroMQ\n"
        f"lengths and rewards: {table.source}; tokens by {table.tokenizer}"
    )


def run_demo(
    *,
    rows: int = ROWS,
    batches: int = BATCHES,
    timeout: float = TIMEOUT,
    producer: Callable[..., Any] = produce,
    trainer: Callable[..., Any] = consume,
) -> DemoResult:
    """Send batches from one process to another and back, and compare every cell.

    Args:
        rows: Rows per batch, a multiple of the table's group size.
        batches: Number of batches.
        timeout: Seconds that the whole run, and any one wait in it, may take.
        producer: What the producer process runs; called and answering as `produce`.
        trainer: What the trainer process runs; called and answering as `consume`.

    Returns:
        What was measured. Both processes have ended.

    Raises:
        JagcodecError: Something differs, a process died, or `timeout` passed; says which.
        ModuleNotFoundError: pyzmq is not installed.
    """
    try:
        import zmq  # noqa: F401
    except ImportError as error:
        raise ModuleNotFoundError(
            "the demo sends over ZeroMQ and found no pyzmq; pip install 'jagcodec[zmq]'",
            name="zmq",
        ) from error
    deadline = monotonic() + timeout
    with (
        tempfile.TemporaryDirectory(prefix="jagcodec-demo-") as name,
        _Child("producer", _bind, producer, (Path(name), rows, batches), timeout) as sender,
        _Child("trainer", _connect, trainer, (Path(name), batches), timeout) as receiver,
    ):
        receiver.tell(_reports([sender], deadline)[0])
        produced, consumed = _reports([sender, receiver], deadline)
        sender.join(deadline)
        receiver.join(deadline)
    return settle(produced, consumed)


class _Child:
    """A process and the pipe to it. Leaving the `with` block ends it."""

    def __init__(
        self,
        role: str,
        plug: Callable[[Any, Connection, float], None],
        work: Callable[..., Any],
        arguments: tuple[Any, ...],
        timeout: float,
    ) -> None:
        self.role = role
        self.pipe, self._far_end = _SPAWN.Pipe()
        self._process = _SPAWN.Process(
            target=_main,
            args=(role, self._far_end, plug, work, arguments, timeout),
            name=f"grpo_demo, {role}",
            daemon=True,
        )

    def __enter__(self) -> _Child:
        # The mask is inherited. Ctrl-C reaches the whole group of processes; the one in front
        # alone answers it, and ends the others. The tracker comes first because multiprocessing
        # lifts the mask where it starts that itself.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # The child has its own now; with this one open, its death would not close the pipe.
        self._far_end.close()
        return self

    def tell(self, value: object) -> None:
        try:
            self.pipe.send(value)
        except OSError:
            raise self._died() from None

    def report(self) -> Any:
        """What it says next; waits for it.

        Raises:
            JagcodecError: It says that it failed, or it died.
        """
        try:
            value = self.pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if isinstance(value, JagcodecError):
            raise value
        return value

    def join(self, deadline: float) -> None:
        """Wait until it has ended well.

        Raises:
            JagcodecError: It did not.
        """
        code = self._ended(max(_GRACE, deadline - monotonic()))
        if code != 0:
            raise self._unexpected(code)

    def _died(self) -> JagcodecError:
        return self._unexpected(self._ended(_GRACE))

    def _ended(self, seconds: float) -> int | None:
        """The exit status, or None if it still runs after this time."""
        self._process.join(seconds)
        return self._process.exitcode

    def _unexpected(self, code: int | None) -> JagcodecError:
        found = "it still running" if code is None else f"exit status {code}"
        return JagcodecError(
            "no_message", f"{self.role} process", f"expected it to report and end, found {found}"
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()


def _reports(children: list[_Child], deadline: float) -> list[Any]:
    """The next report of each child; the first failure among them is raised at once."""
    reports: dict[str, Any] = {}
    waiting = list(children)
    while waiting:
        ready = wait([child.pipe for child in waiting], max(0.0, deadline - monotonic()))
        if not ready:
            silent = " and ".join(child.role for child in waiting)
            raise JagcodecError(
                "no_message", f"{silent} process", "expected a report in time, found none"
            )
        for child in [child for child in waiting if child.pipe in ready]:
            waiting.remove(child)
            reports[child.role] = child.report()
    return [reports[child.role] for child in children]


# --- in the child ------------------------------------------------------------------------------


def _main(
    role: str,
    pipe: Connection,
    plug: Callable[[Any, Connection, float], None],
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    timeout: float,
) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        milliseconds = int(1000 * timeout)
        for option in (zmq.RCVTIMEO, zmq.SNDTIMEO, zmq.LINGER):
            socket.setsockopt(option, milliseconds)
        try:
            plug(socket, pipe, timeout)
            report = work(socket, *arguments)
        except (zmq.Again, TransportTimeoutError):
            report = JagcodecError(
                "no_message",
                f"{role} process",
                f"expected its peer within {timeout:g} s, found none",
            )
        except JagcodecError as error:
            report = error
        # While the socket is open: closing it may wait for a peer that does not listen.
        pipe.send(report)
    if isinstance(report, JagcodecError):
        sys.exit(1)


def _bind(socket: Any, pipe: Connection, timeout: float) -> None:
    pipe.send(socket.bind_to_random_port(_HOST))


def _connect(socket: Any, pipe: Connection, timeout: float) -> None:
    import zmq

    if not pipe.poll(timeout):
        raise zmq.Again
    socket.connect(f"{_HOST}:{pipe.recv()}")
