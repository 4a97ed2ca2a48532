"""Put a rollout batch into TransferQueue, packed, and pad it again for the trainer.

pip install '.[transfer-queue]'; python examples/transfer_queue_put_get.py
"""

from typing import Any

import numpy as np
import ray
import torch
import transfer_queue

import jagcodec.integrations.transfer_queue  # registers the backend, before init()
from jagcodec import materialize, pack_jagged_fields

ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
transfer_queue.init()
assert jagcodec.integrations.transfer_queue.installed()

messages = np.empty(3, dtype=object)
messages[:] = [{"role": "user", "content": f"question {i}"} for i in range(3)]
lengths = torch.tensor([250, 900, 13])
valid = torch.arange(900) < lengths[:, None]
columns: dict[str, Any] = {
    "input_ids": torch.randint(0, 152_000, (3, 900)) * valid,
    "logprobs": torch.randn(3, 900),
    "message": messages,
}
td = pack_jagged_fields(columns, lengths=lengths, token_aligned_fields=["input_ids", "logprobs"])
transfer_queue.kv_batch_put(keys=["a", "b", "c"], partition_id="step_1", fields=td)

found = transfer_queue.kv_batch_get(keys=["c", "b"], partition_id="step_1")
batch = materialize(found, pad_value_dict={"input_ids": 151_643})
assert torch.equal(batch["logprobs"][0, :13], columns["logprobs"][2, :13])
assert batch["message"].tolist() == [messages[2], messages[1]]

whole = transfer_queue.kv_batch_get(keys=["a", "b", "c"], partition_id="step_1")
weighted = whole["input_ids"] * whole["logprobs"]  # both columns share their offsets
assert [len(row) for row in weighted.unbind()] == lengths.tolist()
print(f"{len(whole)} rows back")

transfer_queue.close()
ray.shutdown()
