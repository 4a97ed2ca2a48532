"""What the processes report, and what a person reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from examples.grpo_demo.check import MismatchError


@dataclass(frozen=True)
class Produced:
    """The producer's report on one batch.

    Attributes:
        marks: What had just happened, to when, by a clock that both processes share.
        owed: What must be compared, to number of cells: all of the batch, by its shapes.
        compared: What this process compared, to number of cells.
        columns: Number of columns.
        wire_bytes: Bytes of the message.
        padding_tax: What padding would have cost, as a table.
    """

    marks: dict[str, float]
    owed: dict[str, int]
    compared: dict[str, int]
    columns: int
    wire_bytes: int
    padding_tax: str


@dataclass(frozen=True)
class Consumed:
    """The trainer's report on one batch.

    Attributes:
        marks: As in `Produced`.
        compared: As in `Produced`.
        frame_sizes: Bytes of each frame of the message.
    """

    marks: dict[str, float]
    compared: dict[str, int]
    frame_sizes: tuple[int, ...]


_STAGES = (
    ("pack", "begun", "packed"),
    ("encode", "packed", "encoded"),
    ("send + receive", "encoded", "received"),
    ("decode", "received", "decoded"),
    ("materialize", "decoded", "materialized"),
    ("check every cell", "reference read", "checked"),
    ("slice the responses", "masked", "sliced"),
    ("write back", "slices checked", "written back"),
)


@dataclass(frozen=True)
class DemoResult:
    """What a run measured; `str()` of it is what the demo prints.

    One exists only if every cell that was owed was compared, and equal.

    Attributes:
        last: The producer's report on the last batch.
        frame_sizes: Bytes of each frame of the last batch, as received.
        milliseconds: Stage to its time in each batch.
        compared: What was compared, to number of cells, over all batches.
    """

    last: Produced
    frame_sizes: tuple[int, ...]
    milliseconds: dict[str, tuple[float, ...]]
    compared: dict[str, int]

    @property
    def batches(self) -> int:
        return len(next(iter(self.milliseconds.values())))

    @property
    def cells(self) -> int:
        return sum(self.compared.values())

    def __str__(self) -> str:
        heads = "".join(f"{f'batch {number}':>10}" for number in range(1, self.batches + 1))
        return "\n".join(
            [
                f"batch {self.batches}: {self.last.padding_tax}",
                f"measured at the socket: {sum(self.frame_sizes):,} bytes "
                f"in {len(self.frame_sizes)} frames",
                "",
                f"{'milliseconds':<20}{heads}",
                *(
                    f"{stage:<20}" + "".join(f"{time:>10.2f}" for time in times)
                    for stage, times in self.milliseconds.items()
                ),
                "Each stage ran once per batch; batch 1 pays for all first calls.",
                "",
                f"verified: {self.cells:,} cells, equal bit for bit: "
                f"{self.last.columns} columns of {self.batches} batches, "
                "their response slices, and the advantages written back",
            ]
        )


def settle(produced: Sequence[Produced], consumed: Sequence[Consumed]) -> DemoResult:
    """The result of a run, if all that the producer is owed was compared.

    Raises:
        MismatchError: A batch, or a part of one, was not compared, or not all of it.
    """
    if len(produced) != len(consumed) or not produced:
        raise MismatchError(
            "bad_value",
            "batches",
            f"expected {len(produced)} to be compared, found {len(consumed)}",
        )
    total: dict[str, int] = {}
    times: dict[str, tuple[float, ...]] = {stage: () for stage, _, _ in _STAGES}
    for made, checked in zip(produced, consumed, strict=True):
        compared = checked.compared | made.compared
        for name in made.owed | compared:
            owed, cells = made.owed.get(name, 0), compared.get(name, 0)
            if cells != owed:
                raise MismatchError(
                    "bad_value", name, f"expected {owed} cells to be compared, found {cells}"
                )
            total[name] = total.get(name, 0) + cells
        marks = made.marks | checked.marks
        for stage, begin, end in _STAGES:
            times[stage] += (1000 * (marks[end] - marks[begin]),)
    return DemoResult(produced[-1], consumed[-1].frame_sizes, times, total)
