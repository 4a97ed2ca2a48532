"""The benchmark's sides run and are verified, so that it cannot rot; nothing is timed here."""

import json
import subprocess

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from benchmarks import (
    before,
    before_values,
    costs,
    house,
    limits,
    rows,
    small,
    trips,
    verl_v1,
)
from benchmarks import bytes as saved
from benchmarks.bars import bars
from benchmarks.shapes import PADS, SMALL, Batch, Case, make_batch, make_small_batch
from benchmarks.verl_v1_rows import compare, key_of, number_of, same, trajectory
from benchmarks.verl_v1_rows import expected as expected_row
from jagcodec import encode, pack_rows

EXTRAS = {"rows", "safetensors", "arrow"}  # need packages that only `make bench` installs
BATCH = make_batch(Case("lognormal", 16, 64).lengths())


@pytest.mark.parametrize("name", sorted(set(trips.MAKERS) - EXTRAS))
def test_a_side_brings_every_column_back_again_and_again(name):
    runner = trips.Runner(trips.MAKERS[name](BATCH), BATCH)
    for _ in range(2):
        trip, rectangles = runner.run()
        assert trips.difference(BATCH, rectangles) == ""
    assert trip.wire_bytes >= BATCH.valid_bytes
    assert trip.frames >= 1


def test_the_least_trip_changes_no_cell():
    batch = make_batch(SMALL.lengths())
    runner = trips.Runner(limits.least(batch), batch)
    for _ in range(2):
        assert trips.difference(batch, runner.run()[1]) == ""


def test_a_wrong_cell_is_found():
    columns = dict(BATCH.columns)
    assert trips.difference(BATCH, columns) == ""
    columns["advantages"] = columns["advantages"].clone()
    columns["advantages"][-1, -1] += 1
    assert trips.difference(BATCH, columns) == "column 'advantages'"
    columns["advantages"] = BATCH.columns["advantages"].double()
    assert "float64" in trips.difference(BATCH, columns)
    del columns["advantages"]
    assert trips.difference(BATCH, columns).startswith("columns")


def test_negative_zero_is_not_zero():
    columns = {name: column.clone() for name, column in BATCH.columns.items()}
    columns["advantages"][0, 0] = 0.0
    batch = trips.Batch(BATCH.lengths, columns)  # type: ignore[attr-defined]
    wrong = {**columns, "advantages": columns["advantages"].clone()}
    wrong["advantages"][0, 0] = -0.0
    assert torch.equal(wrong["advantages"], columns["advantages"])
    assert trips.difference(batch, wrong) == "column 'advantages'"


@pytest.mark.parametrize("text", ["512x1536", "512x1536@0.5", "gsm8k:64"])
def test_shapes_are_read_as_they_are_written(text):
    assert str(Case.parse(text)) == text


def test_what_was_not_measured_is_not_met():
    found = bars({"trips": [], "stages": [], "memory": {}})
    assert found
    assert {bar["met"] for bar in found} == {None}


def test_a_batch_is_mapped_as_it_was_saved(tmp_path):
    batch = make_small_batch(3)
    batch.save(tmp_path)
    mapped = Batch.mapped(tmp_path)
    assert trips.difference(batch, mapped.columns) == ""
    assert torch.equal(mapped.lengths, batch.lengths)
    assert list(mapped.columns) == [*PADS, "reward"]


# --- small -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "pairs"), [(1, []), (8, ["--pairs"])])
def test_small_messages_are_measured_beside_pickle(rows, pairs, tmp_path, capsys):
    file = tmp_path / "small.json"
    asked = [f"--rows={rows}", "--rounds=2", "--turns=3", *pairs, f"--json={file}"]
    assert small.main(asked) == 0
    report = json.loads(file.read_text())
    (found,) = report["trips"]
    assert found["rows"] == rows
    assert set(found["us"]) == {"fused", "decoded", "pickle", "encode", "in band"}
    assert all(us > 0 for us in found["us"].values())
    assert set(found["ratios"]) == {"fused", "decoded", "encode"}
    assert found["header_bytes"] > 0
    assert all(each["entered"] > 0 for each in report["functions"].values())
    printed = capsys.readouterr().out
    assert "fused / pickle" in printed
    assert "open_wire + materialize" in printed


def test_a_small_message_that_loses_a_cell_ends_the_run():
    batch = make_small_batch(2, pads=small.ZEROS)
    calls = small.sides(batch)
    small.verify(batch, calls)
    columns = {**batch.columns, "reward": batch.columns["reward"] + 1}
    with pytest.raises(SystemExit, match="pickle, 2 rows: column 'reward'"):
        small.verify(batch, {**calls, "pickle": lambda: columns})


def test_figures_are_held_against_what_is_asked():
    assert small._asked({"median": 2.2, "asked": 2.2}) == "asked 2.2: met"
    assert small._asked({"median": 2.21, "asked": 2.2}) == "asked 2.2: missed"
    assert small._asked({"median": 2.21, "asked": None}) == ""


def test_functions_of_the_package_are_counted_and_no_others(tmp_path):
    file = tmp_path / "inside.py"
    file.write_text(
        "import json\n"
        "def outer():\n"
        "    return [inner() for _ in range(3)], (lambda: inner())(), json.dumps([])\n"
        "def inner():\n"
        "    return len([])\n"
    )
    names = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    assert costs.functions_entered(names["outer"], tmp_path) == 5
    assert costs.functions_entered(names["outer"], tmp_path / "elsewhere") == 0


# --- rows --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error::jagcodec.errors.JagcodecWarning")
def test_rows_are_measured_beside_what_producers_use(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert rows.main(["--seconds=0", "--rows=16", f"--json={file}"]) == 0
    found = json.loads(file.read_text())["parts"]
    assert list(found) == list(rows.PARTS)
    assert all(each["rounds"] >= 3 for each in found.values())
    lines = [line for each in found.values() for line in each["lines"].values()]
    assert all(0 < line["lowest"] <= line["median"] <= line["highest"] for line in lines)
    assert sum(line["asked"] is not None for line in lines) == 12
    printed = capsys.readouterr().out
    assert "materialize / pad_sequence" in printed
    assert printed.count("asked") == 12


def test_rows_that_lose_a_cell_end_the_run():
    samples = rows.make_samples(2)
    batch = rows.padded(samples)
    with pytest.raises(SystemExit, match="VERIFICATION FAILED: trip: reward"):
        rows.same_columns({**batch, "reward": batch["reward"] + 1}, batch, "trip")
    with pytest.raises(SystemExit, match="VERIFICATION FAILED: trip: input_ids"):
        rows.same_row(pack_rows(samples[:1]), {**samples[0], "input_ids": np.ones(3)}, "trip")


@pytest.mark.parametrize("given", ["", "lists,rows"])
def test_a_part_of_no_name_is_refused(given, capsys):
    with pytest.raises(SystemExit):
        rows.main([f"--only={given}"])
    assert "expected some of lists, one_row" in capsys.readouterr().err


# --- house -------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    files = {
        "__init__.py": "from jagcodec.top import top\n",
        "top.py": "from jagcodec import middle\nfrom jagcodec.wire import low\n\ntop = low\n",
        "middle.py": "import jagcodec.wire.low\n",
        "lazy.py": "def f():\n    from jagcodec import top\n",
        "typed.py": "import typing as t\n\nif t.TYPE_CHECKING:\n    import jagcodec.top\n",
        "cli.py": "from jagcodec.top import top\n",
        "wire/__init__.py": "",
        "wire/low.py": "import json\n",
        "wire/kernel.c": "int x;\n\n",
    }
    for name, text in files.items():
        path = tmp_path / "src" / "jagcodec" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "src"


def test_the_longest_import_chain_is_found_file_by_file(source):
    found = house.measure(source)
    assert found["engine_chain"] == ["top.py", "middle.py", "wire/low.py"]
    assert found["chain"] == ["cli.py", "top.py", "middle.py", "wire/low.py"]
    assert found["lines"] == {"python": 14, "c": 2}
    assert found["files"] == {"python": 8, "c": 1}


def test_a_cycle_of_imports_has_no_longest_chain(source):
    (source / "jagcodec" / "wire" / "low.py").write_text("from jagcodec import top\n")
    with pytest.raises(ValueError, match=r"import cycle: .*middle > .*low > .*top > .*middle"):
        house.measure(source)


def test_this_library_is_measured(tmp_path, capsys):
    file = tmp_path / "house.json"
    assert house.main([f"--json={file}"]) == 0
    found = json.loads(file.read_text())
    assert found["engine_chain"][-1] == "errors.py"
    assert len(found["engine_chain"]) <= len(found["chain"])
    assert "lines of Python" in capsys.readouterr().out


# --- before ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_revision_runs_beside_the_working_tree(tmp_path, capsys):
    inside = subprocess.run(["git", "rev-parse", "HEAD"], cwd=before.ROOT, capture_output=True)
    if inside.returncode:
        pytest.skip("not a git checkout")
    file = tmp_path / "before.json"
    asked = ["--revision=HEAD", "--shapes=small:1", "--seconds=0", "--rounds=2"]
    # The margin is one that no machine exceeds, so that the status is that of the values.
    status = before.main([*asked, "--margin=1000", f"--json={file}"])
    report = json.loads(file.read_text())
    assert (status, before.failures(report)) == (0, [])
    assert report["different"]["compared"] > 500
    assert [found["shape"] for found in report["shapes"]] == ["small:1"]
    for found in report["shapes"]:
        assert set(found["trips"]) == {"fused", "reused", "composed"}
        assert all(trip["ratio"] > 0 for trip in found["trips"].values())
    assert "values compared" in capsys.readouterr().out


def test_a_revision_that_does_not_exist_ends_the_run(tmp_path):
    with pytest.raises(SystemExit, match="revision nowhere"):
        before.take_revision("nowhere", tmp_path / "old")


def trip(ratio):
    return {"ratio": ratio, "old_ms": 1.0, "new_ms": ratio, "q1": ratio, "q3": ratio, "rounds": 1}


def test_slower_trips_and_different_values_fail():
    trips_found = {"fused": trip(1.05), "reused": trip(1.2), "composed": trip(0.5)}
    shape = {"shape": "16x64", "different": ["decode"], "trips": trips_found}
    report = {
        "margin": 0.1,
        "different": {"names": ["scalars"]},
        "shapes": [shape, {"shape": "9x9", "skipped": "too large"}],
    }
    assert before.failures(report) == [
        "DIFFERENT: scalars",
        "DIFFERENT: 16x64: decode",
        "SLOWER: 16x64, reused: 1.20 times the time of before",
    ]
    assert before.failures({**report, "margin": 0.3})[2:] == []
    assert before.text(shape, 0.1).count("SLOWER") == 1


def test_the_fastest_attempt_counts():
    attempts = [
        {"trips": {"fused": trip(1.3), "reused": trip(0.9), "composed": trip(1.0)}},
        {"trips": {"fused": trip(1.0), "reused": trip(1.3), "composed": trip(1.0)}},
    ]
    ratios = {side: found["ratio"] for side, found in before.best(attempts).items()}
    assert ratios == {"fused": 1.0, "reused": 0.9, "composed": 1.0}


def test_values_that_one_version_lacks_differ():
    assert before.differing({"a": "1", "b": "2"}, {"a": "1", "c": "3"}) == ["b", "c"]


@pytest.mark.parametrize("shape", ["small:x", "7", "gsm9k:1"])
def test_a_shape_of_no_kind_is_refused(shape, capsys):
    with pytest.raises(SystemExit):
        before.main([f"--shapes={shape}"])
    assert "expected shapes such as" in capsys.readouterr().err


def test_digests_tell_values_apart():
    offsets = torch.tensor([0, 1, 3])
    jagged = torch.nested.nested_tensor_from_jagged(torch.ones(3), offsets)
    other = torch.nested.nested_tensor_from_jagged(torch.ones(3), torch.tensor([0, 2, 3]))
    values = [
        *(None, 1, True, 1.0, -0.0, 0.0, "1", b"1", [1], (1,), {1}, {1: 2}, [[1], 2], [1, [2]]),
        *(
            torch.zeros(2),
            -torch.zeros(2),
            torch.zeros(2, 1),
            torch.zeros(2).double(),
            jagged,
            other,
        ),
        *(np.zeros(2), np.zeros(2, np.float32), np.array(["a"]), np.array(["a"], dtype=object)),
        TensorDict({"a": torch.zeros(2)}, batch_size=[2]),
        TensorDict({"a": torch.zeros(2)}, batch_size=[]),
        TensorDict({"a": NonTensorStack("x", "y")}, batch_size=[2]),
        TensorDict({"a": NonTensorStack("x", "z")}, batch_size=[2]),
    ]
    digests = [before_values.digest(value) for value in values]
    assert len(set(digests)) == len(values)
    assert digests == [before_values.digest(value) for value in values]
    with pytest.raises(TypeError, match="no digest of memoryview"):
        before_values.digest(memoryview(b""))


def test_only_the_values_meant_to_fail_do():
    found = before_values.digests()
    failed = {name for name, digest in found.items() if ":" in digest}
    assert failed == {name for name in found if name.startswith("error: ")}


# --- bytes -------------------------------------------------------------------------------------


def test_bytes_are_weighed_with_each_option(tmp_path, capsys):
    file = tmp_path / "bytes.json"
    asked = ["--turns=1", "--images=2", "--shrink=64", "--only=verl,images,noise,experts"]
    assert saved.main([*asked, "--options=none;narrow;elide;narrow, elide", f"--json={file}"]) == 0
    report = json.loads(file.read_text())
    kinds = [f"images, {kind}" for kind in ("jagged", "one", "equal")]
    few = ["noise, 512 x 1536", "noise, 8 x 64", "noise, wide ids"]
    assert list(report["batches"]) == ["verl", *kinds, *few, "experts"]
    sizes = {
        batch: {option: own["bytes"] for option, own in found["options"].items()}
        for batch, found in report["batches"].items()
    }
    for batch in kinds:
        # What is beside the images counts for more in small ones.
        assert sizes[batch]["elide"] < report["batches"][batch]["once"] + 4096 + 400 * 16
    assert sizes["verl"]["narrow, elide"] < sizes["verl"]["none"] / 5
    for batch in few:
        assert sizes[batch]["narrow, elide"] == sizes[batch]["narrow"]
    assert sizes["experts"]["narrow"] < sizes["experts"]["none"] / 7
    assert len(report["bars"]) == 16
    assert capsys.readouterr().out.count(": bytes more than narrow alone") == 2


def test_a_value_that_is_lost_ends_the_weighing():
    made = saved.make_noise([3, 4])
    other = saved.make_noise([3, 5])
    with pytest.raises(SystemExit, match="VERIFICATION FAILED: noise: decode"):
        saved.verify(made.value, encode(other.value), "noise")
    with pytest.raises(SystemExit, match="VERIFICATION FAILED: a column"):
        saved.same_column(torch.ones(2), torch.zeros(2), "a column")


def test_every_bit_of_what_is_weighed_is_compared():
    column = saved.nested([np.zeros(2, np.float32), np.ones(3, np.float32)])
    for found in (column, column.to_padded_tensor(0.0)):
        saved.same_column(found, column, "a column")
    other = saved.nested([np.array([0, -0.0], np.float32), np.ones(3, np.float32)])
    longer = saved.nested([np.zeros(3, np.float32), np.ones(3, np.float32)])
    padded = column.to_padded_tensor(0.0)
    padded[0, 2] = -0.0
    payloads, wrong = NonTensorStack({"a": torch.zeros(2)}), NonTensorStack({"a": -torch.zeros(2)})
    saved.same_column(payloads, payloads, "a column")
    pairs = [(other, column), (longer, column), (padded, column), (column.double(), column)]
    wrongly: list[tuple[object, object]] = [*pairs, (wrong, payloads)]
    for other_column, expected in wrongly:
        with pytest.raises(SystemExit, match="VERIFICATION FAILED: a column"):
            saved.same_column(other_column, expected, "a column")


def test_levels_are_weighed(tmp_path):
    file = tmp_path / "bytes.json"
    assert saved.main(["--turns=1", "--shrink=100", "--only=levels", f"--json={file}"]) == 0
    options = json.loads(file.read_text())["batches"]["levels"]["options"]
    assert list(options) == list(saved.LEVELS)
    assert (
        options["narrow, zstd of level 1"]["bytes"]
        < options["narrow"]["bytes"]
        < options["none"]["bytes"]
    )


def test_speeds_at_which_an_option_breaks_even():
    assert saved.break_even(10**6, 8.0) == pytest.approx(1.0)
    assert saved.break_even(10**6, -1.0) is None  # whatever the link
    assert saved.break_even(-1, 1.0) == 0


@pytest.mark.parametrize("given", ["", "verl,rows"])
def test_a_batch_of_no_name_is_refused(given, capsys):
    with pytest.raises(SystemExit):
        saved.main([f"--only={given}"])
    assert "expected some of verl, images" in capsys.readouterr().err


# --- verl_v1 -----------------------------------------------------------------------------------

KEYS = [key_of(number) for number in (5, 6)]


def read(phase):
    """What a queue that works returns for two rows of one prompt."""

    def column(*cells):
        if not isinstance(cells[0], torch.Tensor):
            return NonTensorStack(*cells)
        if cells[0].dim() == 0:
            return torch.stack(cells)
        return torch.nested.as_nested_tensor(list(cells), layout=torch.jagged)

    rows = [expected_row(key, phase) for key in KEYS]
    return TensorDict({name: column(*(row[name] for row in rows)) for name in rows[0]}, [2])


def test_trajectories_have_the_columns_of_an_agent_loop():
    row, other = trajectory(5), trajectory(6)
    tensors = {name for name, cell in row.items() if isinstance(cell, torch.Tensor)}
    assert (len(row), len(tensors)) == (24, 8)
    assert torch.equal(row["prompts"], other["prompts"])
    assert not torch.equal(row["responses"][:50], other["responses"][:50])
    assert torch.equal(row["input_ids"], torch.cat([row["prompts"], row["responses"]]))
    assert 500 <= len(row["input_ids"]) == len(row["position_ids"]) <= 3000
    of_response = tensors - {"prompts", "input_ids", "position_ids"}
    assert {len(row[name]) for name in of_response} == {len(row["responses"])}
    assert [number_of(key_of(number)) for number in (0, 7, 8, 255)] == [0, 7, 8, 255]


def test_readers_expect_what_earlier_phases_wrote():
    row, (key, _) = trajectory(5), KEYS
    prompt, ids = len(row["prompts"]), row["input_ids"]
    assert list(expected_row(key, "old_log_prob workers")) == list(row)
    whole = expected_row(key, "old_log_prob driver")
    assert set(whole) >= {"entropy", "log_probs"}
    assert torch.equal(whole["entropy"], ids.float() * 1e-5)
    last = expected_row(key, "update workers")
    assert len(last) == 30
    assert torch.equal(last["entropy"], ids[prompt - 1 : -1].float() * 1e-5)
    assert torch.equal(last["old_log_probs"], ids[prompt - 1 : -1].float() * -1e-5)
    assert torch.equal(last["log_probs"], ids.float() * -2e-5)
    assert torch.equal(last["returns"], row["rm_scores"] + row["rm_scores"])


@pytest.mark.parametrize("phase", ["rollout", "metrics driver", "NeMo-RL, get"])
def test_a_batch_that_was_read_right_is_counted(phase):
    assert compare(read(phase), KEYS, phase) == 2 * len(expected_row(KEYS[0], phase))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rm_scores", lambda column: column * -1),  # 0.0 becomes -0.0
        ("rm_scores", lambda column: column.double()),
        ("prompts", lambda column: torch.stack(column.unbind())),  # equally long in both rows
        ("num_turns", lambda column: torch.tensor(column.tolist())),
        ("num_turns", lambda column: NonTensorStack(*map(float, column.tolist()))),
    ],
    ids=["bits", "dtype", "dense", "tensor", "type"],
)
def test_a_column_that_was_read_wrong_is_found(name, change):
    data = read("metrics driver")
    column = change(data.get(name))
    with pytest.raises(ValueError, match=f"metrics driver: column '{name}'"):
        compare(data.exclude(name).set(name, column), KEYS, "metrics driver")
    with pytest.raises(ValueError, match="metrics driver: expected"):
        compare(data.exclude(name), KEYS, "metrics driver")


def test_objects_are_the_same_in_order_and_type():
    value = {"a": [1, {"b": ""}], "c": 0.5}
    assert same({"a": [1, {"b": ""}], "c": 0.5}, value)
    for other in [
        {"c": 0.5, "a": [1, {"b": ""}]},
        {"a": [True, {"b": ""}], "c": 0.5},
        {"a": (1, {"b": ""}), "c": 0.5},
        {"a": [1, {"b": ""}, 2], "c": 0.5},
        {"a": [1, {"b": None}], "c": 0.5},
    ]:
        assert not same(other, value)


def test_ratios_are_of_medians_over_all_turns():
    def turn(*ms):
        return {"rounds": [{"step": each, "CPU": 0.0} for each in ms], "cells": 3, "unit": "Unit"}

    turns = {"stock": [turn(4.0, 1.0), turn(2.0)], "jagcodec": [turn(1.0), turn(9.0, 1.8)]}
    found = verl_v1.lines(turns)
    assert found["step"] == {
        "stock": {"ms": 2.0, "lowest": 1.0, "highest": 4.0, "ratio": 1.0},
        "jagcodec": {"ms": 1.8, "lowest": 1.0, "highest": 9.0, "ratio": 0.9},
    }
    head = {"machine": {"cpu": "x"}, "versions": {"torch": "2"}, "prompts": 1, "rounds": 3}
    printed = verl_v1.text({**head, "lines": found, "turns": turns})
    assert "0.90, asked 0.8: missed" in printed
    assert "jagcodec: storage units are Unit, 6 cells compared" in printed


@pytest.mark.parametrize("given", ["base", "=.", "base=/no such directory"])
def test_a_way_without_a_directory_is_refused(given, capsys):
    with pytest.raises(SystemExit):
        verl_v1.main([f"--python-path={given}"])
    assert "expected NAME=DIR" in capsys.readouterr().err
