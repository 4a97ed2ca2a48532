"""What runs in a process that has neither torch nor tensordict: rows to messages and back.

The same code runs here, with both. What it prints must be the same. Without them means that nobody
finds them, or, if `JAGCODEC_PRODUCER` names a Python, that this Python runs the code.
"""

import contextlib
import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from jagcodec import BatchedDataDict, decode, encode, open_wire
from jagcodec.wire.spec import TORCH_ITEMSIZES
from tests.columns.test_every_form import KINDS
from tests.helpers import ROOT, run_python

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


def printed_here(code):
    """What code prints in this process, which has both packages."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(f"from jagcodec.schema import FieldSchema\n{code}", {})
    return out.getvalue()


FRAMES = "import hashlib; print([hashlib.sha256(bytes(f)).hexdigest() for f in frames])"


@pytest.mark.parametrize("case", CASES)
def test_a_message_of_rows_has_the_same_bytes_as_with_torch(case):
    code = f"{ROWS}\nfrom jagcodec import encode, encode_rows\nframes = {CASES[case]}\n{FRAMES}"
    assert printed(code, blocked=True) == printed_here(code) != ""


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
    assert there == printed_here(GROWN + FRAMES)
    words = printed(GROWN + "print(row.to_row()['half'].dtype, len(row))", blocked=True)
    assert words == "uint16 5\n"


def test_a_row_goes_on_without_torch_where_a_message_ended():
    code = (
        GROWN
        + """
row = RowBuilder.from_message(frames, same_length=["ids", "logprobs", "half", "mask"])
row.append({"logprobs": 4}, ids=[11, 12], logprobs=[0.5, 0.25, 0.125], half=0.0, mask=False)
frames = row.to_frames()
"""
    )
    assert printed(code + FRAMES, blocked=True) == printed(code + FRAMES, blocked=False) != ""


def test_a_message_goes_from_a_process_without_torch_to_one_with_it(tmp_path):
    file = tmp_path / "rows.jag"
    code = f"{ROWS}\nfrom jagcodec import encode_rows, to_blob\n"
    code += f"open({str(file)!r}, 'wb').write(to_blob(encode_rows(rows, **options)))"
    printed(code, blocked=True)
    td = decode(file.read_bytes())
    assert td["ids"].values().tolist() == [5, 5, 6, 5, 6, 7]
    assert td["experts"].values().shape == (6, 2, 3)
    assert td["positions"].unbind()[2].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [image.shape for image in td["image"]] == [(2, 2), (3, 2), (4, 2)]


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
        ("import jagcodec; jagcodec.decode(b'')", "decode: expected the package t"),
        ("import jagcodec; jagcodec.materialize", "jagcodec.materialize needs t"),
        (
            "import jagcodec; jagcodec.encode_rows({'inner': {'x': [1]}})",
            "encode_rows('inner'): expected the package t",
        ),
        ("import jagcodec; jagcodec.pack_rows([{'a': 1}])", "pack_rows: expected the package t"),
        ("import jagcodec; jagcodec.load('x')", "load: expected the package t"),
        *(
            (f"import jagcodec; f = jagcodec.encode_rows({{'x': [1]}}); jagcodec.{call}", said)
            for call, said in (
                (
                    "open_wire(f).to_tensordict()",
                    "WireBatch.to_tensordict: expected the package t",
                ),
                ("open_wire(f, device='cpu')", "open_wire(device): expected the package t"),
            )
        ),
        *(
            (f"import jagcodec; plan = jagcodec.plan_packing([3, 4]); {call}", said)
            for call, said in (
                ("plan.cu_seqlens", "PackPlan.cu_seqlens: expected the package t"),
                ("plan.pack({'x': [1, 2]})", "PackPlan.pack: expected the package t"),
                ("plan.to('cpu')", "PackPlan.to: expected the package t"),
                ("plan.position_ids()", "PackPlan.position_ids: expected the package t"),
                ("plan.mask()", "PackPlan.mask: expected the package t"),
                ("plan.unpack([1, 2])", "PackPlan.unpack: expected the package t"),
            )
        ),
        *(
            (
                "import jagcodec; batches = jagcodec.plan_micro_batches([3, 4], max_tokens=8); "
                f"batches.{call}",
                said,
            )
            for call, said in (
                ("pack({'x': [1, 2]})", "MicroBatches.pack: expected the package t"),
                ("restore([[1, 2]])", "MicroBatches.restore: expected the package t"),
            )
        ),
    ],
)
def test_what_needs_torch_says_so_with_the_remedy(call, said):
    last = run_blocked(call, status=1).stderr.splitlines()[-1]
    assert said in last
    assert "pip install torch tensordict" in last


# --- read --------------------------------------------------------------------------------------

SMALL = [name for name, size in TORCH_ITEMSIZES.items() if size <= 4 and hasattr(torch, name)]


def batches_of_torch():
    """Batches that senders with torch have, by name."""
    for kind, (make, _) in KINDS.items():
        columns = {"x": make(), "n": torch.arange(3)}
        yield f"{kind} in a BatchedDataDict", BatchedDataDict(columns)
        if kind != "packed":
            td = open_wire(columns).to_tensordict()
            yield f"{kind} in a TensorDict", td
            yield f"{kind} in a dict", {"step": 3, "batch": td}
    words = torch.arange(24, dtype=torch.int32).view(3, 8)
    every = {name: words.view(getattr(torch, name)) for name in SMALL}
    yield "every dtype", TensorDict(every, [3])
    yield "several dims", TensorDict({"x": torch.arange(6.0).view(3, 2)}, [3, 2])
    yield "no rows", TensorDict({"x": torch.ones(0, 2), "i": torch.ones(0, dtype=torch.int8)}, [0])


def hex_messages(batches):
    for name, batch in batches:
        every: list[Any] = [{}, {"narrow": True}, {"elide": True}]
        for options in every:
            frames = [bytes(frame).hex() for frame in encode(batch, **options)]
            yield f"{name}, {options}", {"frames": frames}


def test_messages_have_the_same_bits_without_torch(tmp_path):
    """Beside the second reader, which needs no torch: by name, as arrays, chosen, and joined."""
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(dict(hex_messages(batches_of_torch()))))
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv.append({str(file)!r})\n"
    code += "from tests.wire.read_without_torch import main; main()"
    seen = json.loads(run_blocked(code).stdout)
    assert seen["messages"] > 150
    assert {"JAGGED", "TENSOR", "ARRAY", "NON_TENSOR_ROWS", "NON_TENSOR_DATA"} <= seen.keys()
    assert {"TENSORDICT", "PackedColumn", "refused"} <= seen.keys()


READ = """
from jagcodec import concat_rows, encode_rows, join_columns, open_wire, select_rows, split_rows
from jagcodec import to_rows
batch = open_wire(encode_rows(rows, meta={"step": 3}, **options))
both = concat_rows([batch.rows([2, 0]), batch])
found = {
    "fields": batch.fields,
    "size": tuple(both.batch_size),
    "lengths": both.row_lengths("ids").tolist(),
    "meta": both.meta,
    "schema": {n: (f.kind, str(f.dtype).removeprefix("torch."), f.shape)
               for n, f in both.schema.items()},
    "rows": to_rows(both.select(["ids", "logprobs", "mask", "reward", "answer"]), as_="list"),
    "images": [row["image"].tolist() for row in to_rows(both, ["image"], as_="array")],
    "arrays": [(both.arrays(n).values.tolist(), both.arrays(n).values.dtype.str)
               for n in ("ids", "positions", "experts", "count")],
    "splits": both.arrays("positions").row_splits.tolist(),
    "beside": join_columns([batch, {"more": ["a", "b", "c"]}]).arrays("more").values.tolist(),
    "split": [part.arrays("ids").values.tolist() for part in split_rows(both, max_tokens=4,
              lengths=[3, 1, 1, 2, 3])],
    "chosen": select_rows(both, [True, False, False, False, True]).arrays("ids").values.tolist(),
    "sent": bytes().join(bytes(f) for f in both.rows([4, 1]).to_frames()),
}
print(found)
"""


def test_what_is_read_as_arrays_and_lists_is_the_same_with_torch():
    assert printed(ROWS + READ, blocked=True) == printed_here(ROWS + READ) != ""
    alone = ROWS + READ + "import sys; print('torch' in sys.modules)"
    assert printed(alone, blocked=False).splitlines()[-1] == "True"  # of `schema`, `batch_size`


def test_values_are_arrays_where_torch_is_not_installed():
    code = f"""{ROWS}
from jagcodec import encode_rows, open_wire, to_rows
from jagcodec.types import ColumnArrays
batch = open_wire(encode_rows(rows, **options))
assert batch.batch_size == (3,) and type(batch.batch_size) is tuple
assert type(batch["ids"]) is ColumnArrays and batch["count"].tolist() == [0, 1, 2]
assert batch["image"][1].shape == (3, 2) and batch["answer"][0] == rows[0]["answer"]
assert [row["ids"].tolist() for row in to_rows(batch)] == [[5], [5, 6], [5, 6, 7]]
values = batch["ids"].values
values += 1  # the memory is the caller's
half = open_wire(encode_rows({{"h": [[1.5], [-2.0]]}}, dtypes={{"h": "bfloat16"}}))
assert half["h"].values.tolist() == [0x3FC0, 0xC000] and half.schema["h"].dtype == "bfloat16"
assert to_rows(half, as_="list") == [{{"h": [1.5]}}, {{"h": [-2.0]}}]
"""
    run_blocked(code)


def test_commands_run_without_torch(tmp_path):
    """With torch installed, too: the command line does not wait for its import."""
    file, other, lines = (str(tmp_path / name) for name in ("a.jag", "b.jag", "rows.jsonl"))
    write = f"{ROWS}\nfrom jagcodec import encode_rows, to_blob\n"
    write += (
        "rows = [{k: v for k, v in row.items() if k not in ('blob', 'tags')} for row in rows]\n"
    )
    for name in (file, other):
        code = f"open({name!r}, 'wb').write(to_blob(encode_rows(rows, **options)))"
        printed(write + code, blocked=True)
        write += "rows[1]['logprobs'][1] = 7\n"
    for command in (
        ["inspect", file],
        ["inspect", file, "--row", "1"],
        ["inspect", file, "--json"],
        ["verify", file, other],
        ["diff", file, other],
        ["tax", file, "--column", "ids", "--max-tokens", "8"],
        ["export", file, lines],
    ):
        code = f"import sys; from jagcodec import cli; status = cli.main({command!r})\n"
        code += f"assert status == {int(command[0] == 'diff')}"
        code += "\nprint([name for name in ('torch', 'tensordict') if name in sys.modules])"
        here, there = printed(code, blocked=False), printed(code, blocked=True)
        assert here == there
        assert here.splitlines()[-1] == "[]"
    assert "column logprobs, row 1, cell [1]: value 1.0 and 7.0" in printed(
        f"from jagcodec import cli; cli.main(['diff', {file!r}, {other!r}])", blocked=True
    )
    found = [json.loads(line) for line in Path(lines).read_text().splitlines()]
    assert [row["ids"] for row in found] == [[5], [5, 6], [5, 6, 7]]


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
        assert "without them, rows are written, and read as arrays" in report
        assert "row kernel" in report
        assert "unknown" not in report
