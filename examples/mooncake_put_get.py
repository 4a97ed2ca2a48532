"""Put a rollout batch into a Mooncake store, then read all of it, and then a part of it.

pip install 'jagcodec[mooncake]'; python examples/mooncake_put_get.py
"""

import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
from mooncake.store import MooncakeDistributedStore

from jagcodec import materialize, open_wire
from jagcodec.integrations.mooncake import Store

HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def start_master(rpc: int, http: int, metrics: int) -> subprocess.Popen[bytes]:
    """Start Mooncake's master with its metadata server; a real cluster already has one running."""
    options = {
        "rpc_address": HOST,
        "rpc_port": rpc,
        "enable_http_metadata_server": "true",
        "http_metadata_server_host": HOST,
        "http_metadata_server_port": http,
        "metrics_port": metrics,
    }
    command = [sys.executable, "-m", "mooncake.cli", *(f"--{k}={v}" for k, v in options.items())]
    process = subprocess.Popen(  # noqa: S603
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for _ in range(300):
        try:
            for port in (rpc, http):
                socket.create_connection((HOST, port), timeout=1).close()
            return process
        except OSError:
            time.sleep(0.1)
    process.kill()
    raise SystemExit("mooncake_master did not start")


def main() -> None:
    rpc, http, metrics = free_ports(3)
    master = start_master(rpc, http, metrics)
    client = MooncakeDistributedStore()
    try:
        metadata, segment, local = f"http://{HOST}:{http}/metadata", 1 << 28, 1 << 24
        code = client.setup(HOST, metadata, segment, local, "tcp", "", f"{HOST}:{rpc}")
        if code:
            raise SystemExit(f"setup returned {code}")
        with Store(client) as store:
            put_and_get(store)
        client.close()
    finally:
        master.kill()
        master.wait()


def put_and_get(store: Store) -> None:
    messages = np.empty(4, dtype=object)
    messages[:] = [{"role": "user", "content": f"question {i}"} for i in range(4)]
    lengths = torch.tensor([250, 900, 13, 600])
    valid = torch.arange(900) < lengths[:, None]
    columns: dict[str, Any] = {
        "input_ids": torch.randint(0, 152_000, (4, 900)) * valid,
        "logprobs": torch.randn(4, 900),
        "message": messages,
    }
    size = store.put_fields(
        "step_1", columns, lengths=lengths, token_aligned_fields=["input_ids", "logprobs"]
    )
    padded = sum(columns[name].nbytes for name in ("input_ids", "logprobs"))
    print(f"put {size} bytes instead of {padded}")

    # All of it. Each token is copied once, from the receive buffer to its rectangle.
    batch = materialize(open_wire(store.read("step_1")), pad_value_dict={"input_ids": 151_643})
    assert torch.equal(batch["logprobs"][2, :13], columns["logprobs"][2, :13])
    print(f"{len(batch)} rows back, including {batch['message'][3]['content']!r}")

    # Two rows of one column. Only the header, the offsets and those rows are read.
    part = store.open("step_1").select(["input_ids"]).rows(slice(1, 3)).to_tensordict()
    assert torch.equal(part["input_ids"].unbind()[1], columns["input_ids"][2, :13])
    store.remove("step_1", force=True)  # force: after the reads above, it is still leased


if __name__ == "__main__":
    main()
