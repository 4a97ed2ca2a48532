"""The table of real rollouts, beside the file it is read from."""

import json
from importlib import resources

import numpy as np

from jagcodec.data import rollout_table

FILE = json.loads(
    resources.files("jagcodec.data").joinpath("gsm8k_rollout_lengths.json").read_text()
)


def test_the_table_is_what_the_file_holds():
    assert FILE["columns"] == ["prompt_tokens", "response_tokens", "is_correct"]
    table = rollout_table()
    columns = (table.prompts, table.responses, table.rewards)
    assert [list(row) for row in zip(*columns, strict=True)] == FILE["rows"]
    assert [column.dtype for column in columns] == [np.int64, np.int64, np.float32]
    assert table.lengths.tolist() == [prompt + response for prompt, response, _ in FILE["rows"]]
    assert (table.source, table.tokenizer) == (FILE["source"], FILE["tokenizer"])
    assert len(table.rewards) % table.group_size == 0


def test_the_rows_of_a_group_share_their_prompt():
    table = rollout_table()
    groups = table.prompts.reshape(-1, table.group_size)
    assert (groups == groups[:, :1]).all()


def test_each_table_is_the_callers_own():
    rollout_table().prompts[:] = 0
    assert rollout_table().prompts.min() > 0
