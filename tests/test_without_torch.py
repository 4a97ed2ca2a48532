"""What runs in a process that has neither torch nor tensordict: rows to messages, and plans.

The same code runs here, with both. What it prints must be the same. Without them means that nobody
finds them, or, if `JAGCODEC_PRODUCER` names a Python, that this Python runs the code.
"""

import os
import subprocess

import pytest

from jagcodec import decode
from tests.helpers import run_python

# Nobody finds the two packages, as where they are not installed.
BLOCKED = """
import importlib.machinery, sys
class Others(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        missing = name.partition(".")[0] in ("torch", "tensordict")
        return None if missing else super().find_spec(name, path, target)
finders = [each for each in sys.meta_path if each is not importlib.machinery.PathFinder]
sys.meta_path[:] = [*finders, Others]
"""

ROWS = """
import numpy as np
rows = [
    {
        "ids": [5, 6, 7][: i + 1],
        "logprobs": np.arange(i + 1, dtype=np.float32),
        "mask": [True] * (i + 1),
        "experts": np.full((i + 1, 2, 3), i, np.uint8),
        "positions": np.arange(3 * (i + 1)).reshape(3, i + 1),
        "reward": i / 3,
        "count": np.int16(i),
        "image": np.ones((2 + i, 2), np.uint8),
        "answer": {"text": ["x", None], "time": i},
        "tags": ("a", {1, 2}),
        "blob": bytes(9000),
    }
    for i in range(3)
]
options = {"dtypes": {"image": object}, "ragged_dims": {"positions": 2}}
"""

CASES = {
    "rows": "encode_rows(rows, **options)",
    "one row": "encode_rows(rows[:1], **options)",
    "by column": "encode_rows({'ids': [[1], [2, 3]], 'x': np.ones(2), 'y': np.ones((2, 3), 'u2')})",
    "texts": "encode_rows({'t': np.array(['a', 'b']), 'when': np.array([1, 2], 'M8[s]')})",
    "no rows": "encode_rows([], dtypes={'o': object})",
    "narrow, elided, with checksums": (
        "encode_rows(rows, narrow=True, elide=True, checksum=True, meta={'step': 3}, **options)"
    ),
    "names of dtypes": (
        "encode_rows({'a': [[1.5], [2.0, -0.1]], 'b': [3, 4], 'c': [[1], []], 'd': [[1], [0]]},"
        " dtypes={'a': 'bfloat16', 'b': 'float16', 'c': np.dtype('uint32'), 'd': np.uint64})"
    ),
    "dtypes of a schema": (
        "encode_rows({'a': [[[1, 2]], []], 'b': [1.0, 2.0]}, dtypes={"
        "'a': FieldSchema('jagged', 'int32', (9, None, 2)),"
        " 'b': FieldSchema('tensor', 'bfloat16', (9,))})"
    ),
    "values": "encode({'x': np.arange(4), 'y': [1, 2.5, None], 'z': (b'1', {2})})",
    "rows of arrays": "encode({'x': np.array([np.ones(1), None, np.ones(2)], object)})",
}


def run_blocked(code, status=0):
    """A process without the two packages that ran code."""
    producer = os.environ.get("JAGCODEC_PRODUCER")
    if not producer:
        return run_python(BLOCKED + code, status=status)
    run = subprocess.run([producer, "-c", code], capture_output=True, text=True, timeout=100)
    assert run.returncode == status, run.stderr
    return run


def printed(code, blocked):
    code = f"from jagcodec.schema import FieldSchema\n{code}"
    return (run_blocked(code) if blocked else run_python(code)).stdout


FRAMES = "import hashlib; print([hashlib.sha256(bytes(f)).hexdigest() for f in frames])"


@pytest.mark.parametrize("case", CASES)
def test_a_message_of_rows_has_the_same_bytes_as_with_torch(case):
    code = f"{ROWS}\nfrom jagcodec import encode, encode_rows\nframes = {CASES[case]}\n{FRAMES}"
    assert printed(code, blocked=True) == printed("import torch\n" + code, blocked=False) != ""


def test_encode_rows_imports_neither_package_where_both_are_installed():
    code = f"{ROWS}\nfrom jagcodec import encode_rows\nframes = encode_rows(rows, **options)\n"
    code += "import sys; print(sorted({'torch', 'tensordict'} & set(sys.modules)))"
    assert printed(code, blocked=False) == "[]\n"


GROWN = """
import pickle
import numpy as np
from jagcodec import RowBuilder
row = RowBuilder({"logprobs": "float32", "half": "bfloat16"})
row.append(ids=[5, 6, 7], logprobs=0.0, half=1.0, mask=False)
row.append(ids=np.array([8]), logprobs=[-0.5], half=[0.25], mask=True)
row = pickle.loads(pickle.dumps(row))
row.append(ids=(9, 10), logprobs=[-1.5, 2.0], half=[3.0, 4.0], mask=True)
row.append({"ids": 4}, ids=[11, 12], logprobs=[], half=[], mask=[])
row.truncate(5)
row.set(reward=0.5, answer={"a": [1]}, image=np.ones((2, 2), np.uint8))
frames = row.to_frames(narrow=True)
"""


def test_a_row_that_grows_has_the_same_bytes_as_with_torch():
    there = printed(GROWN + FRAMES, blocked=True)
    assert there == printed("import torch\n" + GROWN + FRAMES, blocked=False)
    words = printed(GROWN + "print(row.to_row()['half'].dtype, len(row))", blocked=True)
    assert words == "uint16 5\n"


def test_a_message_goes_from_a_process_without_torch_to_one_with_it(tmp_path):
    file = tmp_path / "rows.jag"
    code = f"{ROWS}\nfrom jagcodec import encode_rows, to_blob\n"
    code += f"open({str(file)!r}, 'wb').write(to_blob(encode_rows(rows, **options)))"
    printed(code, blocked=True)
    td = decode(file.read_bytes())
    assert td["ids"].values().tolist() == [5, 5, 6, 5, 6, 7]
    assert td["experts"].values().shape == (6, 2, 3)
    assert td["positions"].unbind()[2].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [image.shape for image in td["image"].tolist()] == [(2, 2), (3, 2), (4, 2)]


def test_files_and_plans_need_no_torch(tmp_path):
    file = str(tmp_path / "value.jag")
    code = f"""
from jagcodec import Limits, dump, plan_micro_batches, plan_packing
dump({{"x": [1, 2]}}, {file!r})
print(plan_packing([3, 4, 5]), plan_packing([3, 4, 5]).layout.cu_seqlens, Limits())
print(plan_micro_batches([3, 4, 5], max_tokens=8).rows(0))
"""
    assert printed(code, blocked=True) == printed(code, blocked=False) != ""
    assert decode((tmp_path / "value.jag").read_bytes()) == {"x": [1, 2]}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("from jagcodec import decode", "jagcodec.decode needs t"),
        ("import jagcodec; jagcodec.materialize", "jagcodec.materialize needs t"),
        (
            "import jagcodec; jagcodec.encode_rows({'inner': {'x': [1]}})",
            "encode_rows('inner'): expected the package t",
        ),
        ("import jagcodec; jagcodec.pack_rows([{'a': 1}])", "pack_rows: expected the package t"),
        ("import jagcodec; jagcodec.load('x')", "load: expected the package t"),
        (
            "import jagcodec; jagcodec.RowBuilder.from_message([b''])",
            "RowBuilder.from_message: expected the package t",
        ),
        *(
            (f"import jagcodec; plan = jagcodec.plan_packing([3, 4]); {call}", said)
            for call, said in (
                ("plan.cu_seqlens", "PackPlan.cu_seqlens: expected the package t"),
                ("plan.pack({'x': [1, 2]})", "PackPlan.pack: expected the package t"),
                ("plan.to('cpu')", "PackPlan.to: expected the package t"),
            )
        ),
    ],
)
def test_what_needs_torch_says_so_with_the_remedy(call, said):
    last = run_blocked(call, status=1).stderr.splitlines()[-1]
    assert said in last
    assert "pip install torch tensordict" in last


@pytest.mark.skipif("JAGCODEC_PRODUCER" in os.environ, reason="it has no torch")
def test_a_server_with_torch_and_without_tensordict_sends_rows():
    without = BLOCKED.replace('in ("torch", "tensordict")', '== "tensordict"')
    code = f"""
{ROWS}
import datetime, torch
from jagcodec import JagcodecError, encode, encode_rows
from jagcodec.stdlib import register_stdlib_types
register_stdlib_types()
rows[0]["at"] = rows[1]["at"] = rows[2]["at"] = datetime.datetime(2026, 1, 2)
frames = encode_rows(rows, **options)
frames += encode_rows({{"x": range(3), "y": [range(2)] * 3}})
for value in ({{"x": torch.ones(2)}}, {{"x": [torch.ones(2)]}}):
    try:
        encode_rows(value)
    except JagcodecError as error:
        assert "expected the package tensordict" in str(error)
    else:
        raise AssertionError("expected an error")
"""
    run_python(without + code)


@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
def test_a_command_says_without_torch_that_there_is_no_such_file(command):
    arguments = [command, "missing.jag", *(["out.jsonl"] if command == "export" else [])]
    code = f"import sys; from jagcodec import cli; sys.exit(cli.main({arguments!r}))"
    assert "No such file or directory: 'missing.jag'" in run_blocked(code, status=2).stderr


def test_doctor_says_which_half_is_here():
    report = run_blocked("import jagcodec.doctor as d; print(d.report_lines(d.doctor()))").stdout
    if os.environ.get("JAGCODEC_PRODUCER"):
        assert "encode_rows, RowBuilder, to_blob, dump and plans work without" in report
        assert "row kernel" in report
        assert "unknown" not in report
