"""What one training step of many GPUs waits for, padded and packed: a model, on paper.

``python -m benchmarks.scaling_model --gpus 1024`` asks it about your lengths and machines;
``--help`` lists what it can be told.

Rows travel between *ranks* (a data-parallel rank is the tensor-parallel siblings that compute on
the same rows) and a *store*: the data plane, or the one controller that all batches pass through.
A step is a list of *hops*, one after the other; each is a put or a get of some columns. A hop is
three things in turn: the ranks pack, bytes move, the ranks pad. While bytes move, the slowest of
the links, the ranks' sockets and the store's sockets decides. `docs/scaling.md` shows what comes
out and says what the model leaves out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from jagcodec import ArgumentError, JagcodecError, padding_tax
from jagcodec.cli.arguments import positive
from jagcodec.cli.tax import lengths_of
from jagcodec.data import rollout_table

Form: TypeAlias = Literal["padded", "packed"]
FORMS: tuple[Form, Form] = ("padded", "packed")

COLUMNS: Mapping[str, int] = {
    "input_ids": 8,
    "token_mask": 4,
    "generation_logprobs": 4,
    "prev_logprobs": 4,
    "reference_logprobs": 4,
    "advantages": 4,
}
"""Per-token columns of GRPO and the bytes of one cell: those of ``make bench``."""

RECORD = Path(__file__).with_name("scaling.json")
"""The costs that ``python -m benchmarks.scaling --write`` measured."""

BITS = 8
GIGA = 1e9


@dataclass(frozen=True)
class Costs:
    """Seconds that one core is busy. Whoever sends padded columns is charged sockets alone.

    Attributes:
        copy: Per byte of a memcpy, in and out of the same core's memory: to compare with.
        pack: Per byte of tokens: padded columns to a message in memory that is reused.
        pack_call: Per message, however small.
        pad_copy: Per byte of tokens: an open message to rectangles in memory that is reused.
        pad_fill: Per byte of padding, likewise.
        pad_call: Per message, however small.
        send: Per byte: a process hands it to ZeroMQ over TCP, to a peer on the same machine.
        receive: Per byte: the peer's side.
    """

    copy: float
    pack: float
    pack_call: float
    pad_copy: float
    pad_fill: float
    pad_call: float
    send: float
    receive: float


def measured_costs() -> Costs:
    """The costs in `RECORD`.

    Example:
        >>> from benchmarks.scaling_model import measured_costs
        >>> measured_costs().pack > 0
        True
    """
    return Costs(**json.loads(RECORD.read_text(encoding="utf-8"))["costs"])


@dataclass(frozen=True)
class Hop:
    """Some columns of all rows, once from the ranks to the store or back.

    Attributes:
        name: For tables.
        puts: From the ranks to the store; else from the store to the ranks.
        columns: Names in `COLUMNS`.
        shared: All tensor-parallel siblings need what was fetched.
    """

    name: str
    puts: bool
    columns: tuple[str, ...]
    shared: bool = False

    @property
    def cell_bytes(self) -> int:
        """Bytes of one token in these columns."""
        return sum(COLUMNS[name] for name in self.columns)


GRPO: tuple[Hop, ...] = (
    Hop("rollouts", True, ("input_ids", "token_mask", "generation_logprobs")),
    Hop("for log-probabilities", False, ("input_ids", "token_mask"), shared=True),
    Hop("log-probabilities", True, ("prev_logprobs",)),
    Hop("for the reference", False, ("input_ids", "token_mask"), shared=True),
    Hop("reference log-probabilities", True, ("reference_logprobs",)),
    Hop("for advantages", False, ("token_mask",)),
    Hop("advantages", True, ("advantages",)),
    Hop("for training", False, tuple(COLUMNS), shared=True),
)
"""A step of GRPO with a reference model, as NeMo-RL and verl write it: who needs which columns."""


@dataclass(frozen=True)
class Workload:
    """The rows of one step of the whole job.

    Attributes:
        rows: N.
        width: S, what rectangles are padded to.
        fill: Share of the N x S cells that are tokens.
    """

    rows: int
    width: int
    fill: float

    def __post_init__(self) -> None:
        for name in ("rows", "width"):
            _check_count("Workload", name, getattr(self, name))
        if not 0 <= self.fill <= 1:
            raise ArgumentError(
                "bad_option", "Workload(fill)", f"expected a share from 0 to 1, found {self.fill}"
            )

    @property
    def cells(self) -> int:
        return self.rows * self.width

    @property
    def tokens(self) -> float:
        return self.cells * self.fill


@dataclass(frozen=True)
class Cluster:
    """The machines of a job. Every node has one link of the same speed, in and out at once.

    Attributes:
        gpus: All of them.
        tensor_parallel: GPUs that compute on the same rows.
        gpus_per_node: GPUs that share a node's link.
        store_nodes: Links that the store has; 1 is a single controller.
        store_cores: Cores of each of them that serve sockets.
        siblings_fetch: Each sibling fetches by itself; else one does, and broadcasts.
    """

    gpus: int
    tensor_parallel: int = 8
    gpus_per_node: int = 8
    store_nodes: int = 8
    store_cores: int = 1
    siblings_fetch: bool = False

    def __post_init__(self) -> None:
        for name in ("gpus", "tensor_parallel", "gpus_per_node", "store_nodes", "store_cores"):
            _check_count("Cluster", name, getattr(self, name))
        if self.gpus % self.tensor_parallel:
            raise ArgumentError(
                "bad_option",
                "Cluster(gpus)",
                f"expected a multiple of tensor_parallel={self.tensor_parallel}, found {self.gpus}",
            )

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return self.gpus // self.tensor_parallel

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def links(self) -> int:
        """Links that carry a hop side by side: the ranks' or the store's, the fewer of them."""
        return min(self.nodes, self.store_nodes)


WIRE = "the wire"
PARTS = (WIRE, "sockets of the store", "sockets of the ranks", "broadcast", "packing", "padding")
"""What a step can wait for."""


@dataclass(frozen=True)
class StepCost:
    """A step, in seconds of waiting.

    Attributes:
        moved: Bytes into and out of the store.
        parts: For each of `PARTS`, the seconds in which everything else waits for it.
    """

    moved: float
    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bottleneck(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])


def step_cost(
    workload: Workload,
    cluster: Cluster,
    gbit: float,
    form: Form,
    *,
    costs: Costs | None = None,
    hops: Sequence[Hop] = GRPO,
) -> StepCost:
    """What a step moves and waits for.

    Args:
        workload: Its rows.
        cluster: The machines.
        gbit: Speed of each link, Gb/s; `math.inf` for one that takes no time.
        form: How columns travel: as rectangles, or without their padding.
        costs: By default those measured.
        hops: What a step does, in turn.

    Returns:
        Bytes and seconds.

    Raises:
        ArgumentError: `gbit` is not above 0.

    Example:
        >>> from benchmarks.scaling_model import Cluster, Workload, step_cost
        >>> workload = Workload(rows=16_384, width=32_768, fill=0.275)
        >>> cost = step_cost(workload, Cluster(1024, store_nodes=1), 10, "padded")
        >>> cost.bottleneck, round(cost.moved / 1e9)
        ('the wire', 45)
    """
    if not gbit > 0:
        raise ArgumentError(
            "bad_option", "step_cost(gbit)", f"expected Gb/s above 0, found {gbit!r}"
        )
    costs = costs or measured_costs()
    link = gbit * GIGA / BITS
    parts = dict.fromkeys(PARTS, 0.0)
    moved = 0.0
    for hop in hops:
        # Of one data-parallel rank.
        tokens = workload.tokens * hop.cell_bytes / cluster.ranks
        padding = workload.cells * hop.cell_bytes / cluster.ranks - tokens
        message = tokens if form == "packed" else tokens + padding
        alone = cluster.siblings_fetch and hop.shared
        total = message * cluster.ranks * (cluster.tensor_parallel if alone else 1)
        moved += total

        near, far = (costs.send, costs.receive) if hop.puts else (costs.receive, costs.send)
        moving = {
            WIRE: total / cluster.links / link,
            "sockets of the store": total / (cluster.store_nodes * cluster.store_cores) * far,
            "sockets of the ranks": message * near,
        }
        slowest = max(moving, key=lambda name: moving[name])
        parts[slowest] += moving[slowest]
        if hop.shared and not alone:
            # A binomial tree: between the nodes of the siblings first, then inside each.
            rounds = _doublings(cluster.tensor_parallel)
            across = _doublings(-(-cluster.tensor_parallel // cluster.gpus_per_node))
            parts["broadcast"] += rounds * message * (costs.send + costs.receive)
            parts[WIRE] += across * message / link
        if form == "packed" and hop.puts:
            parts["packing"] += costs.pack_call + tokens * costs.pack
        elif form == "packed":
            parts["padding"] += costs.pad_call + tokens * costs.pad_copy + padding * costs.pad_fill
    return StepCost(moved, parts)


def wire_limit(
    workload: Workload,
    cluster: Cluster,
    form: Form,
    *,
    costs: Costs | None = None,
    hops: Sequence[Hop] = GRPO,
) -> float:
    """The speed of links, Gb/s, from which on a step waits for something else more than for them.

    Example:
        >>> from benchmarks.scaling_model import Cluster, Workload, step_cost, wire_limit
        >>> workload, cluster = Workload(16_384, 32_768, 0.275), Cluster(1024)
        >>> limit = wire_limit(workload, cluster, "packed")
        >>> step_cost(workload, cluster, 0.99 * limit, "packed").bottleneck
        'the wire'
        >>> step_cost(workload, cluster, 1.01 * limit, "packed").bottleneck == 'the wire'
        False
    """
    costs = costs or measured_costs()
    slow, fast = -20.0, 20.0  # powers of ten
    for _ in range(50):
        middle = (slow + fast) / 2
        cost = step_cost(workload, cluster, 10**middle, form, costs=costs, hops=hops)
        slow, fast = (middle, fast) if cost.bottleneck == WIRE else (slow, middle)
    return float(10**fast)


def table(workload: Workload, cluster: Cluster, gbits: Sequence[float]) -> str:
    """A step at several speeds of the links, for people.

    Raises:
        ArgumentError: As `step_cost`.
    """
    store = _counted(cluster.store_nodes, "node")
    widths = max(len(name) for name in PARTS)
    hops = sum(hop.cell_bytes for hop in GRPO)
    lines = [
        f"{cluster.gpus:,} GPUs, {_counted(cluster.ranks, 'data-parallel rank')}, "
        f"store on {store}; {workload.rows:,} rows of {workload.width:,}, "
        f"{workload.fill:.1%} tokens",
        f"{len(GRPO)} hops of a GRPO step, {hops} bytes per token: "
        + ", ".join(
            f"{step_cost(workload, cluster, gbits[0], form).moved / GIGA:,.2f} GB {form}"
            for form in FORMS
        ),
        f"{'Gb/s':>6}  {'padded s':>9}  {'waits for':<{widths}}  {'packed s':>9}  waits for",
    ]
    for gbit in gbits:
        cells = [f"{gbit:>6g}"]
        for form in FORMS:
            cost = step_cost(workload, cluster, gbit, form)
            cells += [f"{cost.seconds:>9.3f}", f"{cost.bottleneck:<{widths}}"]
        lines.append("  ".join(cells).rstrip())
    limits = [f"{wire_limit(workload, cluster, form):,.3g} Gb/s {form}" for form in FORMS]
    lines.append(f"the wire is what a step waits for up to {', '.join(limits)}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        print(_answer(options))
    except (JagcodecError, OSError) as error:
        print(f"scaling_model: error: {error}", file=sys.stderr)
        return 2
    return 0


def _lengths(file: Path | None) -> list[int]:
    if file is not None:
        return lengths_of(file.read_bytes(), str(file))
    found = rollout_table()
    print(f"lengths: {found.source}; tokens by {found.tokenizer}")
    return [int(length) for length in found.lengths]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling_model",
        description="Say what a step of many GPUs moves and waits for, padded and packed. This is "
        "a model: docs/scaling.md says what it leaves out.",
    )
    parser.add_argument(
        "--lengths",
        metavar="FILE",
        type=Path,
        help="a JSON list of tokens per row; by default, real GSM8K rollouts",
    )
    parser.add_argument(
        "--width", metavar="S", type=positive, help="width of the rectangle; by default, the "
        "longest row",
    )  # fmt: skip
    parser.add_argument(
        "--rows",
        metavar="N",
        type=positive,
        help="rows of the step, of lengths such as these; by default, as many as there are lengths",
    )
    parser.add_argument("--gpus", metavar="G", type=positive, required=True, help="GPUs of the job")
    parser.add_argument(
        "--gbit",
        metavar="B,B",
        type=_speeds,
        default=[25.0, 100.0, 400.0],
        help="speeds of each node's link in Gb/s; by default 25,100,400",
    )
    parser.add_argument(
        "--tensor-parallel",
        metavar="T",
        type=positive,
        default=Cluster.tensor_parallel,
        help="GPUs that compute on the same rows; by default %(default)s",
    )
    parser.add_argument(
        "--store-nodes",
        metavar="K",
        type=positive,
        default=Cluster.store_nodes,
        help="nodes of the store; 1 is a single controller; by default %(default)s",
    )
    parser.add_argument(
        "--store-cores",
        metavar="C",
        type=positive,
        default=Cluster.store_cores,
        help="cores of each of these nodes that serve sockets; by default %(default)s",
    )
    return parser


def _speeds(text: str) -> list[float]:
    try:
        speeds = [float(part) for part in text.split(",")]
    except ValueError:
        speeds = []
    if not speeds or not all(0 < speed < math.inf for speed in speeds):
        raise argparse.ArgumentTypeError(
            f"expected Gb/s above 0, with commas between them, found {text!r}"
        )
    return speeds


def _answer(options: argparse.Namespace) -> str:
    cluster = Cluster(
        options.gpus,
        tensor_parallel=options.tensor_parallel,
        store_nodes=options.store_nodes,
        store_cores=options.store_cores,
    )
    lengths = _lengths(options.lengths)
    workload = Workload(
        rows=options.rows or len(lengths),
        width=options.width or max(lengths, default=0),
        fill=padding_tax(lengths, padded_width=options.width).fill,
    )
    return table(workload, cluster, options.gbit)


def _doublings(parties: int) -> int:
    return math.ceil(math.log2(parties))


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _check_count(owner: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(
            "bad_option", f"{owner}({name})", f"expected 1 or more, found {value!r}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
