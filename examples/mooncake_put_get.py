"""Rollout batches in a Mooncake store: `put`, `get` and `opened`, to copy into your program.

pip install 'mooncake-transfer-engine-non-cuda>=0.3.13'; python examples/mooncake_put_get.py
"""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from mooncake.store import MooncakeDistributedStore

from jagcodec import WireBatch, encode, materialize, open_wire, pack_jagged_fields

HOST = "127.0.0.1"
NO_SUCH_KEY = -704
READ_AHEAD = 1 << 18


# --- the recipe --------------------------------------------------------------------------------


def put(client: Any, key: str, value: Any, **options: Any) -> int:
    """Encode a value directly into registered memory, and put it; returns its size.

    `options` are those of `encode`. With ``checksum=True``, `get` finds a damaged value.
    """
    if client.is_exist(key):  # otherwise Mooncake does nothing, and reports success
        raise ValueError(f"put({key!r}): expected a new key, found it taken")
    memory: list[np.ndarray[Any, Any]] = []

    def allocate(size: int) -> np.ndarray[Any, Any]:
        memory.append(np.empty(size, dtype=np.uint8))
        return memory[0]

    size = encode(value, out=allocate, **options)
    with registered(client, memory[0]) as address:
        check(client.put_from(key, address, size), f"put({key!r})")
    return size


def get(client: Any, key: str) -> np.ndarray[Any, Any]:
    """Read the value under a key, for `decode`, `open_wire` and `materialize`."""
    size = check(client.get_size(key), f"get({key!r})")
    memory = np.empty(size, dtype=np.uint8)
    with registered(client, memory) as address:
        check(client.get_into(key, address, size), f"get({key!r})")
    return memory


def opened(client: Any, key: str) -> WireBatch:
    """Open the batch under a key: columns and rows are read when they are asked for."""
    end = check(client.get_size(key), f"opened({key!r})")

    def fetch(start: int, size: int) -> np.ndarray[Any, Any]:
        memory = np.empty(size, dtype=np.uint8)
        with registered(client, memory) as address:
            found = client.get_into_ranges([address], [[key]], [[[0]]], [[[start]]], [[[size]]])
        check(found[0][0][0], f"opened({key!r}), bytes {start} to {start + size}")
        return memory

    # One read for the header and what is next to it: over TCP a read takes 0.2 to 0.5 ms however
    # small it is. Read-only, so that whatever keeps a part of it copies that part.
    head = fetch(0, min(READ_AHEAD, end))
    head.flags.writeable = False

    def read(start: int, size: int) -> np.ndarray[Any, Any]:
        size = max(0, min(size, end - start))
        if start + size <= len(head):
            return head[start : start + size]
        return fetch(start, size)

    return open_wire(read)


@contextmanager
def registered(client: Any, memory: np.ndarray[Any, Any]) -> Iterator[int]:
    """The address of memory that the transfer engine may use.

    Registering takes time: keep a few large buffers registered if you put and get often. Do not
    use the memory of a failed transfer again, because the engine may still write to it.
    """
    address = memory.ctypes.data
    check(client.register_buffer(address, memory.nbytes), "register_buffer")
    try:
        yield address
    finally:
        client.unregister_buffer(address)


def check(code: int, what: str) -> int:
    """The result of a call of Mooncake's, unless it is an error."""
    if code == NO_SUCH_KEY:
        raise KeyError(f"{what}: no such key; it was removed, evicted, or never put")
    if code < 0:
        raise ConnectionError(f"{what}: Mooncake failed with code {code}")
    return code


# --- a cluster on this machine, and a batch ----------------------------------------------------


@contextmanager
def cluster(segment: int = 1 << 28) -> Iterator[Any]:
    """A client of a new master, which gives the store `segment` bytes of its memory."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(3)]
    rpc, http, metrics = (each.getsockname()[1] for each in sockets)
    for each in sockets:
        each.close()
    options = {
        "rpc_address": HOST,
        "rpc_port": rpc,
        "enable_http_metadata_server": "true",
        "http_metadata_server_host": HOST,
        "http_metadata_server_port": http,
        "metrics_port": metrics,
    }
    command = [sys.executable, "-m", "mooncake.cli", *(f"--{k}={v}" for k, v in options.items())]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    master = subprocess.Popen(command, **quiet)  # noqa: S603
    try:
        for port in (http, rpc):
            wait_for(port)
        client = MooncakeDistributedStore()
        metadata = f"http://{HOST}:{http}/metadata"
        code = client.setup(HOST, metadata, segment, 1 << 24, "tcp", "", f"{HOST}:{rpc}")
        check(-abs(code), "setup")
        yield client
        client.close()
    finally:
        master.kill()
        master.wait()


def wait_for(port: int) -> None:
    for _ in range(300):
        try:
            return socket.create_connection((HOST, port), timeout=1).close()
        except ConnectionError:
            time.sleep(0.1)
    raise TimeoutError("mooncake_master did not start")


def main() -> None:
    lengths = torch.tensor([250, 900, 13, 600])
    messages = np.empty(4, dtype=object)
    messages[:] = [{"role": "user", "content": f"question {i}"} for i in range(4)]
    ids = torch.randint(0, 152_000, (4, 900))
    logprobs = torch.randn(4, 900)
    columns = {"input_ids": ids, "logprobs": logprobs, "message": messages}
    names = ["input_ids", "logprobs"]
    batch = pack_jagged_fields(columns, lengths=lengths, token_aligned_fields=names)
    with cluster() as client:
        print(f"put {put(client, 'step_1', batch)} bytes")
        # All of it: each token is copied once, from the received memory to its rectangle.
        back = materialize(get(client, "step_1"), pad_value_dict={"input_ids": 151_643})
        assert torch.equal(back["logprobs"][2, :13], logprobs[2, :13])
        print(f"{len(back)} rows back, including {back['message'][3]['content']!r}")
        # Two rows of one column: the header, the offsets and those rows are read.
        part = opened(client, "step_1").select(["input_ids"]).rows(slice(1, 3)).to_tensordict()
        assert torch.equal(part["input_ids"].unbind()[1], ids[2, :13])
        client.remove("step_1", True)  # it is still leased to its readers, so force it


if __name__ == "__main__":
    main()
