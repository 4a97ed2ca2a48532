"""A Mooncake cluster on this machine, for measurements and tests: a master, and nodes if wanted."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mooncake.store import MooncakeDistributedStore

HOST = "127.0.0.1"
SECONDS = 30


class Master(NamedTuple):
    """A running `mooncake_master` with its metadata server."""

    process: subprocess.Popen[bytes] | None
    address: str
    metadata: str

    def client(
        self, *, segment: int, buffer: int = 1 << 24, kind: type = MooncakeDistributedStore
    ) -> Any:
        """A client that gives the store `segment` bytes of its memory, by TCP."""
        client = kind()
        code = client.setup(HOST, self.metadata, segment, buffer, "tcp", "", self.address)
        if code:
            raise ConnectionError(f"no Mooncake master at {self.address}: setup returned {code}")
        return client


@contextlib.contextmanager
def master(*options: str) -> Iterator[Master]:
    """Start a master on free ports of the loopback, and kill it at the end.

    Raises:
        RuntimeError: It ended, or did not answer in time; its log is in the text.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind((HOST, 0))
        rpc, http, metrics = (each.getsockname()[1] for each in sockets)
    command = [
        *(sys.executable, "-m", "mooncake.cli"),
        *(f"--rpc_address={HOST}", f"--rpc_port={rpc}"),
        *(f"--metrics_host={HOST}", f"--metrics_port={metrics}"),
        *("--enable_http_metadata_server=true", f"--http_metadata_server_host={HOST}"),
        f"--http_metadata_server_port={http}",
        *options,
    ]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + SECONDS
            while not (_answers(rpc) and _answers(http)):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    text = log.read()[-2000:].decode(errors="replace")
                    raise RuntimeError(f"mooncake_master did not start: {text}")
                time.sleep(0.02)
            yield Master(process, f"{HOST}:{rpc}", f"http://{HOST}:{http}/metadata")
        finally:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def node(running: Master, segment: int) -> Iterator[subprocess.Popen[str]]:
    """A process that gives the store `segment` bytes of memory, and does nothing else."""
    code = (
        "import sys; from benchmarks.mooncake_cluster import Master; "
        f"client = Master(None, {running.address!r}, {running.metadata!r})"
        f".client(segment={segment}); print('up', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            # It prints a line of its own, or ends, and with it the lines.
            lines = iter(process.stdout.readline, "") if process.stdout else iter(())
            if not any(line.strip() == "up" for line in lines):
                raise RuntimeError("a node did not start")
            yield process
        finally:
            process.kill()
