"""The table of real rollouts, compared with the file it is read from."""

import json
from importlib import resources

import numpy as np

from jagcodec.data import rollout_table


def test_the_table_is_what_the_file_holds():
    path = resources.files("jagcodec.data").joinpath("gsm8k_rollout_lengths.json")
    file = json.loads(path.read_text())
    rollout_table().prompts[:] = 0  # each table is the caller's own
    table = rollout_table()
    columns = (table.prompts, table.responses, table.rewards)
    assert file["columns"] == ["prompt_tokens", "response_tokens", "is_correct"]
    assert [list(row) for row in zip(*columns, strict=True)] == file["rows"]
    assert [column.dtype for column in columns] == [np.int64, np.int64, np.float32]
    assert table.lengths.tolist() == [prompt + response for prompt, response, _ in file["rows"]]
    groups = table.prompts.reshape(-1, table.group_size)
    assert (groups == groups[:, :1]).all()
