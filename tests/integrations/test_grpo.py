"""The comparison of examples/grpo.py: it notices every column, and where its cells are."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist

from examples import grpo
from jagcodec import concat_rows, join_columns, open_wire


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """More threads take longer for such small tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def rows(one_thread):
    """Two groups, one of which has images, of an engine that is far off, so that weights differ."""
    torch.manual_seed(1)
    policy, numbers = grpo.Policy(), np.random.default_rng(0)
    found = grpo.sampled_group(policy, numbers, "a", with_image=False)
    found += grpo.sampled_group(policy, numbers, "b", with_image=True)
    for row in found:
        row["logprobs"] = [logprob - i % 3 for i, logprob in enumerate(row["logprobs"])]
    return found


@pytest.fixture
def update(monkeypatch):
    """A function of rows: one update of one rank, as (policy, batch, loss)."""
    monkeypatch.setattr(grpo, "RANKS", 1)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def update(rows):
        policy = grpo.Policy().double()
        halves = rows[: grpo.GROUP], rows[grpo.GROUP :]
        batch = concat_rows([open_wire(grpo.message_of(half, 0)) for half in halves])
        batch = join_columns([batch, {"advantages": grpo.group_advantages(batch)}])
        batches = grpo.planned(batch)
        batch = grpo.with_old_logprobs(policy, batch, batches, 0)
        return policy, batch, grpo.add_gradients(policy, batch, batches, 0)

    yield update
    dist.destroy_process_group()


def exchanged(column):
    """A column whose first two cells that differ have changed places."""
    changed = copy.deepcopy(column)
    first = next(i for i in range(1, len(column)) if np.any(column[i] != column[0]))
    changed[0], changed[first] = column[first], column[0]
    return changed


CHANGES = {
    "nothing": lambda row: row,
    "input_ids": lambda row: row | {"input_ids": exchanged(row["input_ids"])},
    "loss_mask": lambda row: row | {"loss_mask": [False, *row["loss_mask"][1:]]},
    "logprobs": lambda row: row | {"logprobs": exchanged(row["logprobs"])},
    "top_ids": lambda row: row | {"top_ids": exchanged(row["top_ids"])},
    "top_logprobs": lambda row: row | {"top_logprobs": exchanged(row["top_logprobs"])},
    "experts": lambda row: row | {"experts": (row["experts"] + 1) % grpo.EXPERTS},
    "reward": lambda row: row | {"reward": row["reward"] + 0.25},
    "uid": lambda row: row | {"uid": "a"},
    "image": lambda row: row | {"image": None},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_reference_with_one_row_that_differs_in_one_column_is_noticed(rows, update, name):
    policy, batch, loss = update(rows)
    others = [*rows[:-1], CHANGES[name](rows[-1])]
    padded = grpo.padded_batch(policy, others)
    if name == "nothing":
        grpo.compare(policy, batch, loss, padded)
    else:
        with pytest.raises(AssertionError, match="not close"):
            grpo.compare(policy, batch, loss, padded)
