"""Packing plans against what verl's own function makes of the same rows, cell by cell."""

import dataclasses
import importlib.util
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jagcodec import plan_packing

verl = pytest.importorskip("verl", reason="verl is not installed: see docs/verl.md")

BATCHES = 500


@dataclasses.dataclass
class PackedSeqParams:
    """What verl fills in of Megatron's class."""

    qkv_format: str
    cu_seqlens_q: Any
    max_seqlen_q: int
    cu_seqlens_kv: Any
    max_seqlen_kv: int
    cu_seqlens_q_padded: Any
    cu_seqlens_kv_padded: Any
    cp_partition_mode: str = "zigzag"


@pytest.fixture(scope="module")
def engine():
    """verl's module with a Megatron that knows sizes and a rank, and nothing else."""
    state: Any = types.ModuleType("megatron.core.parallel_state")
    core: Any = types.ModuleType("megatron.core")
    core.parallel_state = state
    params: Any = types.ModuleType("megatron.core.packed_seq_params")
    params.PackedSeqParams = PackedSeqParams
    stubs = {"megatron": types.ModuleType("megatron"), "megatron.core": core}
    stubs |= {module.__name__: module for module in (state, params)}
    path = Path(verl.__file__).parent / "models/mcore/util.py"
    spec: Any = importlib.util.spec_from_file_location("verl_models_mcore_util", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, stub in stubs.items():
            patch.setitem(sys.modules, name, stub)
        spec.loader.exec_module(module)
        yield module, state


def drawn(rng):
    """Row lengths, sizes, options of verl's function, and those of a plan."""
    lengths = rng.integers(1, rng.choice([8, 70, 300]), rng.integers(1, 9)).tolist()
    tp, cp = int(rng.choice([1, 2, 4])), int(rng.choice([1, 2, 3, 4]))
    layout = str(rng.choice(["zigzag", "contiguous"]))
    row = tp * cp * (2 if layout == "zigzag" and cp > 1 else 1)
    total, fp8, theirs = 1, bool(rng.integers(2)), dict[str, Any]()
    if fp8:
        row, total = math.lcm(16, row), row * 128
    least = int(rng.choice([0, 0, 1, 5])) * max(row, total)
    if least:
        theirs["min_local_rows"] = least
    if rng.integers(2):
        bucket = theirs["pad_to_length_bucket"] = int(rng.choice([64, 512]))
        total = math.lcm(total, bucket, cp)
    theirs |= {"use_fp8_padding": fp8, "cp_layout": layout}
    ours: dict[str, Any] = {"row_multiple": row, "total_multiple": total, "min_total": cp * least}
    ours |= {"tail": "last_row", "cp_size": cp, "cp_layout": layout}
    return lengths, (tp, cp), theirs, ours


def test_every_cell_is_that_of_verl(engine):
    module, state = engine
    rng = np.random.default_rng(4)
    for _ in range(BATCHES):
        lengths, (tp, cp), theirs, ours = drawn(rng)
        values = torch.from_numpy(rng.integers(1, 1 << 40, sum(lengths)))
        offsets = torch.tensor([0, *np.cumsum(lengths)])
        column = torch.nested.nested_tensor_from_jagged(values, offsets)
        plan: Any = plan_packing(lengths, **ours)
        rank = int(rng.integers(cp))
        state.get_tensor_model_parallel_world_size = lambda tp=tp: tp
        state.get_context_parallel_world_size = lambda cp=cp: cp
        state.get_context_parallel_rank = lambda rank=rank: rank
        cells, params, positions = module.preprocess_thd_engine(column, **theirs)
        mask = plan.mask(rank)
        assert torch.equal(params.cu_seqlens_q, plan.cu_seqlens_padded), (lengths, theirs)
        assert params.max_seqlen_q == plan.max_seqlen_padded
        assert torch.equal(cells[0], plan.pack(column, cp_rank=rank))
        assert torch.equal(positions[0][mask], plan.position_ids(rank)[mask])
        labels, *_ = module.preprocess_thd_engine(column, need_roll=True, **theirs)
        # verl fills the last cell of a row with a token of this row or of another.
        followed = plan.pack(torch.ones_like(values), shift=-1, cp_rank=rank).bool()
        assert torch.equal(labels[0][followed], plan.pack(column, shift=-1, cp_rank=rank)[followed])
