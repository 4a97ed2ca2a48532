"""Send a verl DataProto through Ray without its padding, to a task that adds a column to it.

docs/verl.md says what to install; then run python examples/verl_dataproto.py
"""

import numpy as np
import ray
import torch
from verl import DataProto

import jagcodec.integrations.verl  # noqa: F401  lets `encode` accept a DataProto
from jagcodec import encode
from jagcodec.integrations import setup

PROMPT, RESPONSE, PAD = 256, 1024, 151_643


@ray.remote
def compute_values(data: DataProto) -> DataProto:
    """A worker: it gets its own copy, with the padding restored."""
    data.batch["values"] = data.batch["old_log_probs"] * 2
    return data.select(batch_keys=["values"], non_tensor_batch_keys=["uid"])


def make_batch(rows: int) -> DataProto:
    """Prompts padded on the left, responses on the right, as verl's rollouts make them."""
    mask = torch.zeros(rows, PROMPT + RESPONSE, dtype=torch.int64)
    for row in range(rows):
        mask[row, PROMPT - 20 * row - 9 : PROMPT + 100 * row + 50] = 1
    ids = torch.randint(0, 150_000, mask.shape).where(mask.bool(), torch.tensor(PAD))
    return DataProto.from_dict(
        tensors={
            "prompts": ids[:, :PROMPT],
            "responses": ids[:, PROMPT:],
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(dim=1) - 1).clip(min=0),
            "old_log_probs": torch.randn(rows, RESPONSE).where(mask[:, PROMPT:] > 0, 0.0),
        },
        non_tensors={"uid": np.array([{"prompt": row // 2} for row in range(rows)])},
        meta_info={"temperature": 1.0},
    )


def main() -> None:
    setup()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"worker_process_setup_hook": "jagcodec.integrations.setup"},
    )
    data = make_batch(8)
    padded = sum(column.nbytes for column in data.batch.values())
    sent = sum(memoryview(frame).nbytes for frame in encode(data))
    print(f"{padded} bytes of rectangles, {sent} bytes on the wire")

    parts = [compute_values.remote(chunk) for chunk in data.chunk(2)]
    values = DataProto.concat(ray.get(parts, timeout=150))
    data = data.union(values)
    assert torch.equal(data.batch["values"], data.batch["old_log_probs"] * 2)
    print(f"{len(data)} rows back, including {data.non_tensor_batch['uid'][7]}")
    ray.shutdown()


if __name__ == "__main__":
    main()
