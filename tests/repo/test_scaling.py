"""The model on paper: what it must hold whatever the costs are, and the page that shows it."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import scaling as command
from benchmarks import scaling_model
from benchmarks.report import ROOT, rewritten
from benchmarks.scaling_model import (
    COLUMNS,
    FORMS,
    GRPO,
    WIRE,
    Cluster,
    Costs,
    Hop,
    Workload,
    measured_costs,
    step_cost,
    table,
    wire_limit,
)
from benchmarks.shapes import DTYPES, PADS
from jagcodec import JagcodecError

FREE = Costs(*[0.0] * len(dataclasses.fields(Costs)))
ONE_HOP = (Hop("all", False, tuple(COLUMNS), shared=True),)
workloads = st.builds(
    Workload, rows=st.integers(1, 10**6), width=st.integers(1, 10**5), fill=st.floats(0.001, 1)
)
clusters = st.builds(
    lambda ranks, **rest: Cluster(ranks * rest["tensor_parallel"], **rest),
    ranks=st.integers(1, 2000),
    tensor_parallel=st.sampled_from([1, 2, 8, 16]),
    gpus_per_node=st.sampled_from([1, 4, 8]),
    store_nodes=st.integers(1, 200),
    store_cores=st.integers(1, 16),
    siblings_fetch=st.booleans(),
)
speeds = st.floats(0.1, 1e4)


def test_by_hand():
    """One get of 28 bytes per token, four ranks of two siblings on four nodes, two in the store."""
    workload = Workload(rows=1000, width=100, fill=0.25)
    costs = Costs(0, 1e-9, 1e-3, 2e-9, 1e-9, 2e-3, 3e-9, 5e-9)
    cluster = Cluster(8, tensor_parallel=2, gpus_per_node=2, store_nodes=2)
    padded = step_cost(workload, cluster, 8e-3, "padded", costs=costs, hops=ONE_HOP)
    packed = step_cost(workload, cluster, 8e-3, "packed", costs=costs, hops=ONE_HOP)
    # 1000 x 100 x 28 bytes over two links of 1 MB/s; a broadcast of a quarter of it in one round.
    assert padded.moved == 2_800_000
    assert padded.parts[WIRE] == pytest.approx(1.4)
    assert padded.parts["broadcast"] == pytest.approx(700_000 * 8e-9)
    assert padded.parts["padding"] == padded.parts["packing"] == 0
    assert packed.moved == 700_000
    assert packed.parts[WIRE] == pytest.approx(0.35)
    assert packed.parts["padding"] == pytest.approx(2e-3 + 175_000 * 2e-9 + 525_000 * 1e-9)
    assert packed.seconds == pytest.approx(sum(packed.parts.values()))
    # A link that takes no time: a rank's socket receives 700 kB, two of the store's send 1.4 MB.
    fast = step_cost(workload, cluster, math.inf, "padded", costs=costs, hops=ONE_HOP)
    assert fast.parts["sockets of the store"] == pytest.approx(1_400_000 * 3e-9)
    assert fast.parts[WIRE] == fast.parts["sockets of the ranks"] == 0
    put = (dataclasses.replace(ONE_HOP[0], puts=True, shared=False),)
    sent = step_cost(workload, cluster, math.inf, "packed", costs=costs, hops=put)
    assert sent.parts["packing"] == pytest.approx(1e-3 + 175_000 * 1e-9)
    assert sent.parts["sockets of the store"] == pytest.approx(350_000 * 5e-9)
    assert sent.bottleneck == "sockets of the store"


def test_siblings_on_several_nodes_broadcast_over_the_wire():
    workload = Workload(rows=100, width=100, fill=1.0)
    inside = Cluster(8, tensor_parallel=8, gpus_per_node=8, store_nodes=1)
    across = dataclasses.replace(inside, gpus_per_node=2)  # four nodes: two rounds over the wire
    times = [
        step_cost(workload, c, 1, "padded", costs=FREE, hops=ONE_HOP).seconds
        for c in (inside, across)
    ]
    assert times[1] == pytest.approx(3 * times[0])


def test_each_sibling_that_fetches_is_sent_everything():
    cluster = Cluster(16, tensor_parallel=4)
    alone = dataclasses.replace(cluster, siblings_fetch=True)
    workload = Workload(64, 64, 0.5)
    together, apart = (step_cost(workload, c, 1, "packed", hops=ONE_HOP) for c in (cluster, alone))
    assert apart.moved == 4 * together.moved
    assert (together.parts["broadcast"] > 0, apart.parts["broadcast"]) == (True, 0)


@given(workloads, clusters, speeds, st.sampled_from(FORMS))
def test_more_speed_never_makes_a_step_longer(workload, cluster, gbit, form):
    slow, fast = (step_cost(workload, cluster, speed, form) for speed in (gbit, 2 * gbit))
    assert fast.seconds <= slow.seconds
    assert fast.moved == slow.moved
    assert min(slow.parts.values()) >= 0


@given(workloads, clusters, speeds)
def test_without_a_codec_to_pay_packed_is_padded_times_the_fill(workload, cluster, gbit):
    costs = dataclasses.replace(
        measured_costs(), pack=0, pack_call=0, pad_copy=0, pad_fill=0, pad_call=0
    )
    padded, packed = (step_cost(workload, cluster, gbit, form, costs=costs) for form in FORMS)
    assert packed.seconds == pytest.approx(workload.fill * padded.seconds)
    assert packed.moved == pytest.approx(workload.fill * padded.moved)
    assert packed.bottleneck == padded.bottleneck


@given(workloads, clusters, st.sampled_from(FORMS))
def test_the_limit_is_where_the_wire_stops(workload, cluster, form):
    limit = wire_limit(workload, cluster, form)
    assert step_cost(workload, cluster, 0.99 * limit, form).bottleneck == WIRE
    assert step_cost(workload, cluster, 1.01 * limit, form).bottleneck != WIRE


def test_a_batch_of_one_layout_costs_what_its_bytes_do():
    full = Workload(4096, 1024, 1.0)
    padded, packed = (step_cost(full, Cluster(64), 100, form) for form in FORMS)
    assert padded.moved == packed.moved == 4096 * 1024 * sum(hop.cell_bytes for hop in GRPO)
    assert packed.seconds > padded.seconds


def test_the_columns_are_those_that_are_measured():
    assert {n: DTYPES.get(n, torch.float32).itemsize for n in PADS} == COLUMNS


def test_the_table_is_for_people():
    lines = table(Workload(16_384, 32_768, 0.275), Cluster(1024), [25.0, 400.0]).splitlines()
    assert lines[0] == (
        "1,024 GPUs, 128 data-parallel ranks, store on 8 nodes; 16,384 rows of 32,768, 27.5% tokens"
    )
    assert lines[1].endswith("84 bytes per token: 45.10 GB padded, 12.40 GB packed")
    for line, gbit in zip(lines[3:5], ("25", "400"), strict=True):
        assert line.split()[0] == gbit
        assert float(line.split()[1]) > 0
    assert len(lines) == 6
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (lambda: Workload(0, 1, 0.5), "Workload(rows)"),
        (lambda: Workload(1, True, 0.5), "Workload(width)"),
        (lambda: Workload(1, 1, 1.5), "Workload(fill)"),
        (lambda: Workload(1, 1, float("nan")), "Workload(fill)"),
        (lambda: Cluster(0), "Cluster(gpus)"),
        (lambda: Cluster(12), "Cluster(gpus)"),
        (lambda: Cluster(8, store_nodes=0), "Cluster(store_nodes)"),
        (lambda: step_cost(Workload(1, 1, 1), Cluster(8), 0, "padded"), "step_cost(gbit)"),
        (lambda: step_cost(Workload(1, 1, 1), Cluster(8), math.nan, "padded"), "step_cost(gbit)"),
    ],
)
def test_bad_arguments(call, path):
    with pytest.raises(JagcodecError) as caught:
        call()
    assert (caught.value.reason, caught.value.path) == ("bad_option", path)


# --- the command -------------------------------------------------------------------------------


def test_the_command_about_given_lengths(tmp_path, capsys):
    file = tmp_path / "lengths.json"
    file.write_text("[100, 200, 900]")
    job = ["--lengths", str(file), "--gpus", "64", "--rows", "3000", "--width", "1000"]
    job += ["--gbit", "25,400"]
    assert scaling_model.main([*job, "--store-nodes", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "64 GPUs, 8 data-parallel ranks, store on 1 node; 3,000 rows of 1,000, 40.0% tokens"
    )
    assert "84 bytes per token: 0.25 GB padded, 0.10 GB packed" in lines[1]
    assert [line.split()[0] for line in lines[3:5]] == ["25", "400"]
    for line in lines[3:5]:
        padded, packed = (float(word) for word in line.split() if "." in word)
        assert 0 < packed < padded
    assert lines[5].startswith("the wire is what a step waits for up to ")
    assert len(lines) == 6

    assert scaling_model.main([*job, "--store-cores", "4", "--tensor-parallel", "4"]) == 0
    expected = Cluster(64, store_cores=4, tensor_parallel=4)
    assert capsys.readouterr().out == table(Workload(3000, 1000, 0.4), expected, [25, 400]) + "\n"


def test_the_command_about_real_lengths():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scaling_model", "--gpus", "1024"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "openai/grade-school-math" in lines[0]
    assert "1,024 GPUs, 128 data-parallel ranks, store on 8 nodes; 5,276 rows of 574" in lines[1]
    assert [line.split()[0] for line in lines[4:7]] == ["25", "100", "400"]


@pytest.mark.parametrize(
    ("lengths", "arguments", "said"),
    [
        ("[1]", ["--gpus", "12"], "expected a multiple of tensor_parallel=8, found 12"),
        ("[3, 9]", ["--gpus", "8", "--width", "4"], "expected rows of at most 4 tokens, found 9"),
        ("[1, 2.5]", ["--gpus", "8"], "row 1: expected a whole number of tokens, found 2.5"),
        ("[]", ["--gpus", "8"], "Workload(rows): expected 1 or more, found 0"),
    ],
)
def test_the_command_about_jobs_that_are_not_valid(tmp_path, capsys, lengths, arguments, said):
    file = tmp_path / "lengths.json"
    file.write_text(lengths)
    assert scaling_model.main(["--lengths", str(file), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("scaling_model: error: ")
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--gbit", "25"],
        ["--gpus", "0"],
        ["--gpus", "8", "--rows", "-1"],
        ["--gpus", "8", "--gbit", "25,0"],
        ["--gpus", "8", "--gbit", "fast"],
        ["--gpus", "8", "--gbit", "inf"],
    ],
)
def test_arguments_that_do_not_parse(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        scaling_model.main(arguments)
    assert left.value.code == 2
    assert ": error: " in capsys.readouterr().err


# --- the page ----------------------------------------------------------------------------------


def test_no_figure_of_the_page_is_copied_by_hand():
    """If this fails after a new measurement: python -m benchmarks.scaling --page"""
    page = command.PAGE.read_text()
    assert rewritten(page, command.tables()) == page


def test_every_table_is_shown():
    shown = re.findall(r"<!-- measured: ([\w-]+) -->", command.PAGE.read_text())
    assert sorted(shown) == sorted(command.tables())


def test_what_the_page_says_in_words_is_so():
    """Sentences of docs/scaling.md that a new measurement could make wrong."""
    costs = measured_costs()
    assert costs.pack < 2 * costs.copy
    assert costs.pad_copy < 2 * costs.copy
    assert costs.receive > 2 * costs.pack
    alone, few, spread = (
        [step_cost(command.LONG, cluster, gbit, "packed").bottleneck for gbit in command.SPEEDS]
        for cluster in command.STORES.values()
    )
    assert set(alone) == {"sockets of the store"}
    assert few[0] == WIRE
    assert set(spread) == {"broadcast"}
    everywhere = command.STORES["all 128 nodes, 8 cores each"]
    bare = dataclasses.replace(costs, send=0.0, receive=0.0)
    for gbit in command.SPEEDS:
        padded, packed = (
            step_cost(command.LONG, everywhere, gbit, form, costs=bare).seconds for form in FORMS
        )
        assert (padded < packed) is (gbit >= 100)
