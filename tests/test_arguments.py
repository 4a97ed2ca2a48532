"""Every option of every public function over odd values: a result, or an error of this library.

`CALLS` has a valid call of each public function. A test changes one option of it at a time.
"""

import functools
import importlib
import inspect
import os
import re
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import jagcodec
from jagcodec import (
    BatchedDataDict,
    RowBuilder,
    dump,
    encode_fields,
    open_wire,
    plan_micro_batches,
    plan_packing,
)
from jagcodec.errors import ArgumentError, JagcodecError, WireFormatError, brief
from jagcodec.record import RecordReader, RecordWriter
from jagcodec.testing import is_same
from jagcodec.wire import registry
from tests import odd
from tests.helpers import nested

SOURCE = Path(jagcodec.__file__).parent

# --- calls -------------------------------------------------------------------------------------

IDS = torch.tensor([[5, 6, 0], [7, 8, 9]])
JAGGED = nested([[1, 2], [3, 4]])
FRAMES = encode_fields({"ids": IDS, "reward": torch.ones(2)}, lengths=[2, 3])

Options = dict[str, Any]
ENCODE: Options = {
    **{"narrow": False, "elide": False, "checksum": False, "compress": None, "meta": None},
    **{"allow_pickle": False, "default": None},
}
LOAD: Options = {"device": None, "allow_pickle": False, "limits": None}
DECODE: Options = {"copy": None, **LOAD}
FIELDS: Options = {
    **{"fields": {"ids": IDS, "reward": torch.ones(2)}, "lengths": [2, 3], "strict": False},
    **{"token_aligned_fields": ["ids"], "mask": None},
}
OF_ROWS: Options = {
    "rows": [{"ids": [5, 6], "reward": 0.5}, {"ids": [7], "reward": 1.0}],
    **{"dtypes": None, "same_length": (), "rectangular": (), "ragged_dims": None},
}
BATCH: Options = {"batch": odd.batch()}
ENVELOPE: Options = {"data": "AQACAAMABAA=", "shape": [2, 2], "dtype": "int16"}
SAMPLE_OF_SGLANG: Options = {
    "output_ids": [7, 8],
    "meta_info": {
        **{"finish_reason": None, "prompt_tokens": 1},
        **{"routed_experts": "AQAAAAIAAAA=", "routed_experts_start_len": 1},
    },
}


def data():
    return BatchedDataDict({"ids": nested([[5, 6], [7]]), "reward": torch.ones(2)})


def opened():
    return open_wire(FRAMES)


def row():
    made = RowBuilder()
    made.append(ids=[1, 2])
    return made


def packed():
    return plan_packing([2, 3], row_multiple=4, cp_size=2)


def micro_batches():
    return plan_micro_batches([2, 3], max_tokens=8)


def writer():
    made = RecordWriter("record")
    made.rewind(0)
    return made


# By name below `jagcodec`; that of a method follows its class, whose object `self` makes.
CALLS: dict[str, Options] = {
    "concat_rows": {"batches": [FRAMES, odd.batch()]},
    "decode": {"frames": FRAMES, **DECODE},
    "dump": {"obj": 1, "path": "dumped.jag", **ENCODE},
    "encode": {"obj": odd.batch(), "out": None, **ENCODE},
    "encode_fields": {**FIELDS, "out": None, **ENCODE},
    "encode_rows": {**OF_ROWS, **ENCODE},
    "join_columns": {"batches": [{"x": torch.ones(2)}, odd.batch()], "replace": False},
    "load": {"path": "loaded.jag", "mmap": False, **LOAD},
    "materialize": {
        **{"td": odd.batch(), "layout": "padded", "pad_value_dict": None, "pad_to_seqlen": 0},
        **{"pad_to_multiple": 1, "padding_side": "right", "prompt_lengths": None, "device": None},
        **{"prompt_width": 0, "token_aligned_fields": None, "keep_jagged": (), "strict": False},
        **{"attention_mask_of": None, "align_end": None, "pin_memory": False, "out": None},
        "container": BatchedDataDict,
    },
    "maybe_pack_jagged": {"val": IDS, "lengths": [2, 3]},
    "open_wire": {"source": FRAMES, **DECODE},
    "pack_jagged_fields": FIELDS,
    "pack_per_token_field": {"val": IDS, "lengths": [2, 3]},
    "pack_rows": OF_ROWS,
    "padding_tax": {
        **{"source": odd.batch(), "lengths": None, "token_aligned_fields": None},
        **{"padded_width": None, "options": False},
    },
    "plan_micro_batches": {
        **{"lengths": [2, 3], "ranks": 1, "max_tokens": 8, "row_multiple": 1, "total_multiple": 1},
        **{"rows_per_batch": None, "count": None, "count_multiple": 1, "groups": None},
        **{"cost": None, "fill": "error"},
    },
    "plan_packing": {
        **{"lengths": [2, 3], "row_multiple": 4, "total_multiple": 1, "total": None},
        **{"min_total": 0, "tail": "own_row", "cp_size": 2, "cp_layout": "zigzag"},
    },
    "register_type": {"cls": odd.Number, "name": None, "to_state": int, "from_state": int},
    "repeat_rows": {**BATCH, "times": 2, "interleave": True},
    "response_from_nested": {"full": JAGGED, "response_mask": nested([[1], [1]])},
    "select_rows": {**BATCH, "index": [0]},
    "split_rows": {**BATCH, "parts": None, "sizes": [1, 1], "max_tokens": None, "lengths": None},
    "stack_or_nest": {
        **{"tensors": [torch.ones(2), torch.ones(3)], "always_nest": False, "ragged_dim": None}
    },
    "to_blob": {"frames": FRAMES},
    "to_nested_by_length": {"padded": IDS, "lengths": [2, 3]},
    "to_rows": {**BATCH, "columns": None, "as_": "tensor"},
    "unwrap_wire_stripped_payload": {"item": None},
    "MicroBatches.__getitem__": {"self": micro_batches, "rank": 0},
    "MicroBatches.is_repeat": {"self": micro_batches, "rank": 0, "step": 0},
    "MicroBatches.pack": {
        **{"self": micro_batches, "batch": {"ids": nested([[5, 6], [7, 8, 9]])}, "rank": 0},
        **{"total": None, "tail": None, "cp_rank": None, "cp_size": 1, "cp_layout": "zigzag"},
        **{"pad_value_dict": None, "labels_of": None, "token_aligned_fields": ()},
        **{"align_end": (), "keep_jagged": ()},
    },
    "MicroBatches.in_order": {"self": micro_batches, "rank": 0, "order": [0]},
    "MicroBatches.rows": {"self": micro_batches, "rank": 0},
    "MicroBatches.report": {"self": micro_batches},
    "MicroBatches.restore": {
        "self": micro_batches,
        "results": [[1, 2]],
        "rank": None,
        "last": None,
    },
    "PackPlan.mask": {"self": packed, "cp_rank": None},
    "PackPlan.pack": {
        **{"self": packed, "source": {"ids": nested([[5, 6], [7, 8, 9]])}, "pad": ..., "shift": 0},
        **{"pad_value_dict": None, "labels_of": None, "token_aligned_fields": ()},
        **{"align_end": (), "keep_jagged": (), "cp_rank": None, "out": None},
    },
    "PackPlan.position_ids": {"self": packed, "cp_rank": None, "pads": "zero"},
    "PackPlan.to": {"self": packed, "device": "cpu"},
    "PackPlan.unpack": {
        "self": packed,
        "values": torch.zeros(8),
        "shift": 0,
        "pad": 0,
        "last": None,
    },
    # classes, and what they add to `dict`
    "BatchedDataDict": {"columns": {"ids": IDS}, "meta_info": None, "named": {"x": [1, 2]}},
    "BatchedDataDict.__ior__": {"self": data, "other": {"x": [1, 2]}},
    "BatchedDataDict.__or__": {"self": data, "other": {"x": [1, 2]}},
    "BatchedDataDict.__setitem__": {"self": data, "name": "x", "column": [1, 2]},
    "BatchedDataDict.copy": {"self": data},
    "BatchedDataDict.rows": {"self": data, "index": [0]},
    "BatchedDataDict.select": {"self": data, "names": ["ids"]},
    "BatchedDataDict.setdefault": {"self": data, "name": "x", "default": [1, 2]},
    "BatchedDataDict.to": {"self": data, "device": "cpu", "non_blocking": False},
    "BatchedDataDict.union": {"self": data, "other": {"x": [1, 2]}},
    "BatchedDataDict.update": {"self": data, "args": [{"x": [1, 2]}], "named": {"y": [1, 2]}},
    "BatchedDataDict.with_columns": {"self": data, "columns": {"x": [1, 2]}},
    "Limits": {"bytes": 1, "header": 1, "objects": 1, "expanded": 1, "depth": 1},
    "MsgpackDecoder": DECODE,
    "MsgpackDecoder.decode": {"self": jagcodec.MsgpackDecoder, "frames": FRAMES},
    "MsgpackEncoder": ENCODE,
    "MsgpackEncoder.encode": {"self": jagcodec.MsgpackEncoder, "obj": 1},
    "RowBuilder": {"dtypes": None, "same_length": None, "ragged_dims": {"experts": 2}},
    "RowBuilder.append": {"self": row, "start": {"ids": 1}, "columns": {"ids": [1, 2]}},
    "RowBuilder.from_message": {
        **{"self": lambda: RowBuilder, "message": opened().rows([0]), "same_length": None}
    },
    "RowBuilder.set": {"self": row, "values": {"reward": 1.0}},
    "RowBuilder.to_frames": {"self": row, **ENCODE},
    "RowBuilder.to_row": {"self": row},
    "RowBuilder.truncate": {"self": row, "tokens": 1},
    "WireBatch.__getitem__": {"self": opened, "name": "ids"},
    "WireBatch.arrays": {"self": opened, "name": "ids"},
    "WireBatch.get": {"self": opened, "name": "ids", "default": None},
    "WireBatch.items": {"self": opened},
    "WireBatch.keys": {"self": opened},
    "WireBatch.row_lengths": {"self": opened, "name": "ids"},
    "WireBatch.rows": {"self": opened, "index": [0]},
    "WireBatch.select": {"self": opened, "names": ["ids"]},
    "WireBatch.to_frames": {"self": opened},
    "WireBatch.to_tensordict": {"self": opened},
    "WireBatch.values": {"self": opened},
    # other modules
    "record.RecordReader": {"directory": "record"},
    "record.RecordReader.file": {"self": lambda: RecordReader("record"), "step": 1},
    "record.RecordWriter": {"directory": "record", "keep": None},
    "record.RecordWriter.close": {"self": writer},
    "record.RecordWriter.rewind": {"self": writer, "step": 1},
    "record.RecordWriter.write": {**{"self": writer, "step": 1, "batch": odd.batch(), **ENCODE}},
    "schema.check_schema": {"batch": FRAMES, "schema": opened().schema, "optional": ()},
    "stdlib.register_stdlib_types": {},
    "testing.assert_same": {"actual": 1, "expected": 1},
    "testing.is_same": {"actual": 1, "expected": 1},
    "integrations.arrow.to_arrow": BATCH,
    "integrations.pillow.register_images": {},
    "integrations.json_arrays.array_of_envelope": {"envelope": ENVELOPE, "max_bytes": 8},
    "integrations.json_arrays.smallest_ids": {
        **{"ids": np.array([[3, 1]]), "experts": 8, "pad": -1}
    },
    "integrations.sglang.rows_of": {
        **{"responses": [SAMPLE_OF_SGLANG], "layers": 1, "top_k": 2, "start_len": [1]},
        **{"earlier": [np.zeros((1, 1, 2), np.uint8)], "experts": 8, "pad": -1, "max_bytes": 8},
    },
    "integrations.torch_distributed.all_gather_rows": {
        **{"batch": odd.batch(), "group": None, "default": None, **LOAD}
    },
    "integrations.torch_distributed.broadcast": {
        **{"batch": odd.batch(), "src": 0, "group": None, "default": None, **LOAD}
    },
    "integrations.vllm.rows_of": {"outputs": [], "top": 2, "prompt_top": 2},
    "integrations.vllm.rows_of_replies": {
        **{"replies": [{"choices": [{"token_ids": [7]}]}], "prompts": [[1, 2]], "max_bytes": 8},
        **{"experts": 8, "pad": -1, "top": None, "prompt_top": None},
    },
}

# Other calls, for options that are only read together: what differs, all of which is changed.
ALSO: list[tuple[str, Options]] = [
    ("split_rows", {"parts": 2, "sizes": None}),
    ("split_rows", {"max_tokens": 8, "lengths": [5, 1], "sizes": None}),
    ("split_rows", {"parts": 1, "max_tokens": 8, "sizes": None}),
    ("materialize", {"padding_side": "left_right", "prompt_lengths": [1, 1], "prompt_width": 2}),
    ("materialize", {"layout": "packed", "pad_to_seqlen": 9, "keep_jagged": ["x"]}),
    ("materialize", {"td": FRAMES, "pad_value_dict": {"ids": -1}, "device": "cpu"}),
    ("pack_jagged_fields", {"mask": IDS > 0, "lengths": None}),
    ("encode_fields", {"mask": IDS > 0, "lengths": None, "strict": True}),
    ("pack_rows", {"rows": [], "dtypes": {"ids": object}}),
    ("encode_rows", {"rows": {"ids": [[5], [7]]}, "dtypes": {"ids": torch.int32}}),
    ("padding_tax", {"source": [5, 1], "padded_width": 9}),
    ("padding_tax", {"source": {"ids": IDS}, "lengths": [2, 3], "token_aligned_fields": ["ids"]}),
    ("stack_or_nest", {"tensors": [torch.ones(2, 3)] * 2, "always_nest": True, "ragged_dim": 2}),
    ("to_rows", {"as_": "list", "columns": ["ids"]}),
    ("repeat_rows", {"times": [2, 0]}),
    ("PackPlan.pack", {"source": torch.zeros(5), "pad": 1, "shift": -1}),
    ("PackPlan.pack", {"source": torch.zeros(5), "out": torch.zeros(8)}),
    ("PackPlan.pack", {"labels_of": "ids", "token_aligned_fields": ["x"]}),
    ("PackPlan.unpack", {"values": [torch.zeros(4)] * 2, "pad": 1}),
    ("MicroBatches.pack", {"total": 8, "tail": "own_row", "labels_of": "ids"}),
    ("plan_packing", {"total": 16}),
    ("plan_packing", {"total_multiple": 8, "min_total": 9}),
]

LEFT_OUT = {
    **dict.fromkeys(("WireBatch", "testing.JaggedBatch"), "made by functions"),
    **dict.fromkeys(("MicroBatches", "PackPlan"), "made by functions"),
    "BatchedDataDict.of_equal_rows": "for callers inside the library: nothing is checked",
    **dict.fromkeys(
        [f"testing.{name}" for name in ("cells", "jagged_batches", "jagged_tensors", "tensors")],
        "draws from hypothesis",
    ),
    **dict.fromkeys(
        [f"integrations.{name}" for name in ("ray", "setup", "transfer_queue", "verl", "zmq")],
        "has tests of its own, with what it needs",
    ),
}

MODULES = ("record", "schema", "stdlib", "testing")
INTEGRATIONS = tuple(
    f"integrations.{path.stem}" for path in (SOURCE / "integrations").glob("[!_]*.py")
)
OPERATORS = {"__getitem__", "__setitem__", "__or__", "__ior__"}


@functools.cache
def named(name):
    """A function, a class or a module by its name below `jagcodec`."""
    *above, last = name.split(".")
    if name in (*MODULES, *INTEGRATIONS, "integrations"):
        return importlib.import_module(f"jagcodec.{name}")
    return getattr(named(".".join(above)) if above else jagcodec, last)


def public_names():
    """The names of all public functions and classes, and of the methods that these define."""
    names = {*vars(jagcodec)["__all__"]} - {"__version__"} | {"integrations.setup"}
    for module in (*MODULES, *INTEGRATIONS):
        if module in LEFT_OUT:
            names.add(module)
            continue
        for name, value in vars(named(module)).items():
            own = getattr(value, "__module__", "") == f"jagcodec.{module}" and callable(value)
            names |= {f"{module}.{name}"} if own and not name.startswith("_") else set()
    for name in [name for name in names - {*INTEGRATIONS} if inspect.isclass(named(name))]:
        if issubclass(named(name), Exception):
            names.remove(name)
        elif name != "testing.JaggedBatch":
            methods = (each for each, value in vars(named(name)).items() if not is_data(value))
            public = {each for each in methods if each in OPERATORS or not each.startswith("_")}
            names |= {f"{name}.{each}" for each in public}
    return names


def is_data(value):
    return not callable(getattr(value, "__func__", value))


def options_of(name):
    """The options of a function by name, with their annotations."""
    function = named(name).__init__ if inspect.isclass(named(name)) else named(name)
    found = {}
    for option, parameter in inspect.signature(function).parameters.items():
        unpacked = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
        if unpacked:
            of_dict = inspect.unwrap(function).__globals__[unpacked[1]].__annotations__
            found |= {key: hint.__forward_arg__ for key, hint in of_dict.items()}
        elif option not in ("self", "cls") or name == "register_type":
            found[option] = parameter.annotation
    return found


def test_every_option_of_every_public_function_is_here():
    assert public_names() == {*CALLS, *LEFT_OUT}
    for name, options in CALLS.items():
        assert {*options_of(name)} == options.keys() - {"self"}, name


# --- values ------------------------------------------------------------------------------------


def inside(option):
    """Ways to put a value inside an option of this name."""
    by_name = lambda value: {"ids": value}  # noqa: E731
    in_list = lambda value: [value]  # noqa: E731
    called = lambda value: lambda *_: value  # noqa: E731
    samples = lambda value: [{"ids": value}]  # noqa: E731
    ways = [
        (by_name, ("start",)),
        (by_name, ("td", "batch", "fields", "pad_value_dict", "out", "meta", "rows", "schema")),
        (by_name, ("padding_side", "attention_mask_of", "dtypes", "ragged_dims", "labels_of")),
        (by_name, ("source",)),
        (in_list, ("values", "pad", "groups", "results", "keep_jagged")),
        (in_list, ("lengths", "sizes", "times", "index", "prompt_lengths", "narrow", "obj")),
        (in_list, ("same_length", "token_aligned_fields", "batches", "frames", "tensors")),
        (in_list, ("outputs", "responses", "replies", "prompts", "earlier", "start_len")),
        (lambda value: {**ENVELOPE, "data": value}, ("envelope",)),
        (lambda value: {**ENVELOPE, "shape": value}, ("envelope",)),
        (lambda value: {**ENVELOPE, "shape": [value]}, ("envelope",)),
        (lambda value: {**ENVELOPE, "dtype": value}, ("envelope",)),
        (lambda value: {"choices": [{"token_ids": [7], "routed_experts": value}]}, ("replies",)),
        (called, ("source", "container", "out", "default", "cost")),
        (lambda value: ("zstd", value), ("compress",)),
        (samples, ("rows",)),
        (lambda value: samples([value]), ("rows",)),
        (lambda value: slice(value, None), ("index",)),
    ]
    return [put for put, options in ways if option in options]


def variants(option, value):
    yield value
    for put in inside(option):
        yield put(value)


def prepared(name, options):
    """What a call is of: the object of a method, the function, and its arguments."""
    options = dict(options)
    make = options.pop("self", None)
    made = None if make is None else make()
    function = named(name) if made is None else getattr(made, name.rpartition(".")[2])
    positional: list[Any] = []
    for option, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(options.pop(option))
        elif parameter.kind is parameter.VAR_POSITIONAL:
            positional += options.pop(option)
        elif parameter.kind is parameter.VAR_KEYWORD and option in options:
            options |= options.pop(option)
    return made, function, positional, options


def call(
    name, options, caller=lambda function, *positional, **named: function(*positional, **named)
):
    """Call a function with options by name, through `caller`; a writer is closed."""
    made, function, positional, named_options = prepared(name, options)
    try:
        found = caller(function, *positional, **named_options)
        made = found if isinstance(found, RecordWriter) else made
        return found
    finally:
        if isinstance(made, RecordWriter):
            made.close()


def changed(name, valid, option, value):
    """A call with another value of an option; of `args` and `**named` in it."""
    parameter = inspect.signature(named(name)).parameters.get(option)
    if parameter is not None and parameter.kind is parameter.VAR_POSITIONAL:
        return {**valid, option: [value]}
    if parameter is not None and parameter.kind is parameter.VAR_KEYWORD:
        return {**valid, option: dict.fromkeys(valid[option], value)}
    return {**valid, option: value}


def fault_of(name, valid, option, value, kind):
    """What is wrong with the answer of a call; None if it is a result or the right error."""
    try:
        found = call(name, changed(name, valid, option, value))
    except odd.OwnError:
        return None
    except WireFormatError as error:
        return None if option in MESSAGES else f"blames a message: {error}"
    except JagcodecError as error:
        return None if error.path else f"names nothing: {error}"
    except OSError as error:
        return None if option in ("path", "directory", "source", "message") else f"{error!r}"
    except AssertionError as error:
        return None if name == "testing.assert_same" else f"{error!r}"
    except Exception as error:
        inner = traceback.extract_tb(error.__traceback__)[-1]
        return None if inner.filename == odd.__file__ else f"{type(error).__name__}: {error!s:.80}"
    holds_options = name in ("MsgpackDecoder", "MsgpackEncoder")
    if kind == "bool" and not holds_options and not isinstance(value, (bool, np.bool_)):
        return f"takes it for True or False: {brief(found)}"
    return None


MESSAGES = {"frames", "source", "message", "td", "batch", "batches", "results"}


@pytest.fixture(scope="module")
def values():
    with warnings.catch_warnings(action="ignore"):
        fixed = [
            *(*odd.python_values(), *odd.array_values()),
            *(*odd.tensor_values(), *odd.batch_values()),
        ]
    return [*(lambda value=value: value for value in fixed), *odd.FRESH]


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Paths that calls name, and a registry and a process group of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # which takes most of the time of `dump`
    dump(odd.batch(), "loaded.jag")
    RecordWriter("record").close()
    monkeypatch.setattr(registry, "_by_name", dict(registry._by_name))
    monkeypatch.setattr(registry, "_name_of", dict(registry._name_of))
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "changes"),
    [*((name, {}) for name in CALLS), *ALSO],
    ids=lambda value: value if isinstance(value, str) else "_".join(value),
)
def test_odd_values(name, changes, values, places):
    valid, kinds, faults = {**CALLS[name], **changes}, options_of(name), []
    call(name, valid)
    for option in changes or kinds:
        for make in values:
            value = make()
            for given in variants(option, value):
                fault = fault_of(name, valid, option, given, kinds[option])
                if fault is not None and value is not odd.HUGE:  # there is no memory for it
                    faults.append(f"{option}={brief(given)}: {fault}")
    assert faults == []


# --- names -------------------------------------------------------------------------------------

# Options that name the column "ids", with one value for each form in which they do.
NAMING: dict[str, list[Any]] = {
    **{option: [["ids"]] for option in ("token_aligned_fields", "keep_jagged", "narrow")},
    **{option: [["ids"]] for option in ("same_length", "rectangular", "optional")},
    **{option: [["ids"]] for option in ("columns", "names")},
    "align_end": [["ids"], {"ids": "whole"}, {"whole": "ids"}],
    "attention_mask_of": [{"ids": "mask"}],
    "dtypes": [{"ids": torch.int32}],
    "labels_of": [{"labels": "ids"}],
    "pad_value_dict": [{"ids": 7}],
    "padding_side": [{"ids": "left"}],
    "ragged_dims": [{"ids": 1}],
    "start": [{"ids": 1}],
}
NOT_NAMES = {
    ("BatchedDataDict", "columns"),
    ("BatchedDataDict.with_columns", "columns"),
    ("RowBuilder.append", "columns"),
}
NAMED_BY_STRINGS = {"dtypes", "ragged_dims", "start"}
WHOLE: Options = {"ids": nested([[5, 6], [7, 8, 9]]), "whole": nested([[5, 6], [7, 8, 9]])}


def names_options():
    """Each public function, an option of it that names a column, and a value of that option."""
    return [
        (name, option, value)
        for name, valid in CALLS.items()
        for option in valid
        if (name, option) not in NOT_NAMES
        for value in NAMING.get(option, ())
    ]


def outcome(name, options):
    """What a call returns, in a form that can be compared; or the type of its error."""
    batch = next((option for option in ("td", "source", "batch") if option in options), None)
    if batch is not None and name in ("materialize", "PackPlan.pack", "MicroBatches.pack"):
        options = {**options, batch: WHOLE}
    try:
        found = call(name, options)
    except JagcodecError as error:
        return type(error)
    if isinstance(found, jagcodec.MsgpackEncoder):
        return found.encode(odd.batch())
    if isinstance(found, RowBuilder):
        return found._same_length, found.to_row()
    return [columns for _, columns in found] if name == "MicroBatches.pack" else found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "option", "value"), names_options())
def test_a_tuple_of_one_name_is_that_name_or_is_refused(name, option, value, places):
    def in_tuple(each):
        return (each,) if each == "ids" else each

    if isinstance(value, dict):
        given: Any = {in_tuple(key): in_tuple(each) for key, each in value.items()}
    else:
        given = [*map(in_tuple, value)]
    found = outcome(name, {**CALLS[name], option: given})
    if option in NAMED_BY_STRINGS:
        assert isinstance(found, type)
        assert issubclass(found, JagcodecError)
    else:
        assert is_same(found, outcome(name, {**CALLS[name], option: value}))


def test_two_values_for_one_column_are_refused():
    both: Any = {"ids": 1, ("ids",): 2}
    for call_with in (
        functools.partial(jagcodec.materialize, odd.batch()),
        functools.partial(plan_packing([2, 1]).pack, odd.batch()),
    ):
        with pytest.raises(ArgumentError, match="one value for each column, found two for 'ids'"):
            call_with(pad_value_dict=both)
