"""The model on paper: what it must hold whatever the costs are, and the page that shows it."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import scaling as command
from benchmarks.report import rewritten
from benchmarks.shapes import DTYPES, PADS
from jagcodec import JagcodecError
from jagcodec.scaling import (
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
