"""Put a batch into Ray's object store once; a worker reads a part of it in place.

pip install '.[ray]'; python examples/ray_store.py
"""

from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict

from jagcodec import WireBatch, encode_fields, materialize, open_wire, pack_jagged_fields
from jagcodec.integrations import setup


@ray.remote
def reward(batch: WireBatch) -> list[int]:
    """A worker that needs two rows of one column, and reads nothing else from the store."""
    ids = batch.rows(slice(0, 2))["input_ids"]
    return [len(row) for row in ids.unbind()]


@ray.remote
def double(td: TensorDict) -> TensorDict:
    td["logprobs"].values().mul_(2)  # td is this worker's own copy
    return td


def main() -> None:
    setup()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"worker_process_setup_hook": "jagcodec.integrations.setup"},
    )
    messages = np.empty(4, dtype=object)
    messages[:] = [{"role": "user", "content": f"question {i}"} for i in range(4)]
    lengths = torch.tensor([250, 900, 13, 600])
    valid = torch.arange(900) < lengths[:, None]
    columns: dict[str, Any] = {
        "input_ids": torch.randint(0, 152_000, (4, 900)) * valid,
        "logprobs": torch.randn(4, 900),
        "message": messages,
    }
    per_token = ["input_ids", "logprobs"]

    wire = open_wire(encode_fields(columns, lengths=lengths, token_aligned_fields=per_token))
    print("lengths read in place:", ray.get(reward.remote(wire), timeout=150))

    td = pack_jagged_fields(columns, lengths=lengths, token_aligned_fields=per_token)
    batch = materialize(ray.get(double.remote(td), timeout=150))
    assert torch.equal(batch["logprobs"][2, :13], columns["logprobs"][2, :13] * 2)
    print(f"{len(batch)} rows back, including {batch['message'][3]['content']!r}")
    ray.shutdown()


if __name__ == "__main__":
    main()
