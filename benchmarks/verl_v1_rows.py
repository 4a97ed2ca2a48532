"""The rows that `benchmarks.verl_v1` puts into a queue, and what every reader must find there."""

from __future__ import annotations

import functools
import random
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from jagcodec.testing import is_same

SESSIONS = 8  # trajectories of one prompt
PROMPT, TOTAL = (100, 400), (500, 3000)  # tokens, the fewest and the most
VOCABULARY = 152_000
GLOBAL_STEP = 7
NEMO_GET, NEMO_WRITE_BACK = "NeMo-RL, get", "NeMo-RL, write-back"

Row = dict[str, Any]

# What the training workers compute in a phase: by column, the factor from a token to its value.
OUTPUTS = {
    "old_log_prob workers": {"log_probs": -1e-5, "entropy": 1e-5},
    "ref workers": {"log_probs": -2e-5},
    NEMO_WRITE_BACK: {"prev_logprobs": -1e-5},
}
# The columns that are read in a phase; in other phases, all of them.
SELECTED = {
    phase: names.split()
    for phase, names in {
        "old_log_prob driver": "entropy log_probs response_mask responses rollout_log_probs",
        "ref driver": "log_probs response_mask",
        "advantage driver": (
            "uid response_mask rm_scores rollout_log_probs old_log_probs ref_log_prob"
        ),
        "metrics driver": (
            "prompts responses response_mask advantages returns rm_scores num_turns"
        ),
        NEMO_GET: "input_ids input_lengths token_mask sample_mask generation_logprobs",
    }.items()
}


def uid_of(prompt: int) -> str:
    return str(uuid.UUID(int=prompt))


def key_of(number: int) -> str:
    """The key of a trajectory, as verl writes it: of the first output of a session."""
    prompt, session = divmod(number, SESSIONS)
    return f"{uid_of(prompt)}_{session}_0"


def number_of(key: str) -> int:
    uid, session, _ = key.split("_")
    return uuid.UUID(uid).int * SESSIONS + int(session)


@functools.cache
def trajectory(number: int) -> Row:
    """A text trajectory as verl's agent loops put it: 8 columns of tensors, 16 of objects."""
    prompt, session = divmod(number, SESSIONS)
    shared, own = random.Random(f"prompt {prompt}"), random.Random(f"trajectory {number}")
    prompts = _tokens(shared.randint(*PROMPT), prompt)
    responses = _tokens(own.randint(*TOTAL) - len(prompts), number)
    mask = torch.ones_like(responses)
    mask[len(mask) // 3 :][:20] = 0  # the answer of a tool
    score = own.random()
    scores = torch.zeros(len(responses))
    scores[-1] = score
    verdict = {"score": score, "acc": score > 0.5, "pred": str(number)}
    question = " ".join(str(shared.randrange(10**6)) for _ in range(60))
    seconds = {"generate_sequences": own.uniform(1, 30), "tool_calls": own.random()}
    return {
        "num_turns": own.randint(2, 6),
        "metrics": {**seconds, "compute_score": 0.01, "num_preempted": 0},
        "extra_fields": {
            **{"turn_scores": [], "tool_rewards": [], "reward_extra_info": verdict},
            **dict.fromkeys(["min_global_steps", "max_global_steps"], GLOBAL_STEP),
        },
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "rollout_log_probs": responses * -3e-5,
        "rm_scores": scores,
        "raw_prompt": [
            {"role": "system", "content": "Think step by step."},
            {"role": "user", "content": question},
        ],
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model": {"ground_truth": str(shared.randrange(1000)), "style": "rule"},
        "extra_info": {"answer": question[:120], "index": prompt, "split": "train"},
        "index": prompt,
        "tools_kwargs": {},
        "interaction_kwargs": {},
        "uid": uid_of(prompt),
        "agent_name": "single_turn_agent",
        "global_steps": GLOBAL_STEP,
        "session_id": session,
        "loss_mask": mask,
        "input_ids": torch.cat([prompts, responses]),
        "position_ids": torch.arange(len(prompts) + len(responses)),
        "multi_modal_inputs": {},
    }


def tag_of(row: Row) -> dict[str, Any]:
    """The tag that verl's agent loops put with a trajectory."""
    lengths = {"prompt_len": len(row["prompts"]), "response_len": len(row["responses"])}
    steps = dict.fromkeys(["global_steps", "min_global_steps", "max_global_steps"], GLOBAL_STEP)
    return {"status": "success", **lengths, "seq_len": sum(lengths.values()), **steps}


@functools.cache
def rollout(number: int) -> Row:
    """The same trajectory in the columns of NeMo-RL's data plane, the written-back one included."""
    row = trajectory(number)
    unseen = torch.zeros_like(row["prompts"])
    return {
        "input_ids": row["input_ids"],
        "generation_logprobs": torch.cat([unseen.float(), row["rollout_log_probs"]]),
        "token_mask": torch.cat([unseen, row["response_mask"]]),
        "input_lengths": torch.tensor(len(row["input_ids"])),
        "sample_mask": torch.tensor(1.0),
        "total_reward": row["rm_scores"][-1],
        "task_name": row["ability"],
        "extra_env_info": {**row["reward_model"], **row["extra_info"]},
        "content": row["raw_prompt"][1]["content"],
        **outputs(row["input_ids"], NEMO_WRITE_BACK),
    }


def outputs(ids: torch.Tensor, phase: str) -> dict[str, torch.Tensor]:
    """What a model returns in this phase: one float32 per token, which the token decides."""
    return {name: ids.float() * factor for name, factor in OUTPUTS[phase].items()}


def _of_response(row: Row, name: str) -> torch.Tensor:
    """The cells that predict the response: they begin one to its left."""
    cells: torch.Tensor = row[name]
    return cells[len(row["prompts"]) - 1 : -1]


# What the phases of a step write into a row that holds what all phases before have written.
WRITTEN: dict[str, Callable[[Row], Row]] = {
    "rollout": lambda row: {},
    "old_log_prob workers": lambda row: outputs(row["input_ids"], "old_log_prob workers"),
    "old_log_prob driver": lambda row: {
        "old_log_probs": _of_response(row, "log_probs"),
        "entropy": _of_response(row, "entropy"),
    },
    "ref workers": lambda row: outputs(row["input_ids"], "ref workers"),
    "ref driver": lambda row: {"ref_log_prob": _of_response(row, "log_probs")},
    "advantage driver": lambda row: dict.fromkeys(["advantages", "returns"], row["rm_scores"] * 2),
}


def expected(key: str, phase: str) -> Row:
    """What a reader in this phase must find in a row."""
    row = dict((rollout if phase.startswith("NeMo-RL") else trajectory)(number_of(key)))
    for earlier, written in WRITTEN.items():
        if earlier == phase or phase.startswith("NeMo-RL"):
            break
        row |= written(row)
    return {name: row[name] for name in SELECTED.get(phase, row)}


def compare(found: TensorDict, keys: Sequence[str], phase: str) -> int:
    """The number of cells of a batch that was read in this phase.

    Raises:
        ValueError: A column, the kind of a column, or a cell is not the expected one.
    """
    rows = [expected(key, phase) for key in keys]
    if set(found.keys()) != set(rows[0]):
        raise ValueError(f"{phase}: expected {set(rows[0])}, found {set(found.keys())}")
    for name, first in rows[0].items():
        column, place = found.get(name), f"{phase}: column {name!r}"
        if _kind(column) != _kind_of_cells(first):
            raise ValueError(f"{place}: expected {_kind_of_cells(first)}, found {_kind(column)}")
        cells = column.unbind() if isinstance(column, torch.Tensor) else column.tolist()
        for key, row, cell in zip(keys, rows, cells, strict=True):
            if not is_same(cell, row[name]):
                raise ValueError(f"{place}: {key}: expected {row[name]!r}, found {cell!r}")
    return len(keys) * len(rows[0])


def _kind(column: Any) -> str:
    if isinstance(column, torch.Tensor):
        return f"{'nested' if column.is_nested else 'dense'} {column.layout}"
    return type(column).__name__


def _kind_of_cells(cell: Any) -> str:
    """The kind of column in which TransferQueue returns such cells."""
    if isinstance(cell, torch.Tensor):
        return "nested torch.jagged" if cell.dim() else "dense torch.strided"
    return "NonTensorStack"


def _tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
