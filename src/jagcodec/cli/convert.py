"""``jagcodec convert``: messages to and from .npz, Arrow and safetensors."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from jagcodec.cli.arguments import Commands, names
from jagcodec.cli.files import display_name, head_and_rest, naming, read_message
from jagcodec.cli.text import counted
from jagcodec.errors import ArgumentError
from jagcodec.wire.spec import Kind

if TYPE_CHECKING:
    from jagcodec.batch.describe import OpenMessage


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "convert",
        help="turn a message into .npz, Arrow or safetensors, and back",
        description="Turn a message into .npz, .arrow (IPC) or .safetensors, or one of these into "
        "a message, by the endings of the names; any other name is that of a message. Jagged "
        "columns are NAME.values and NAME.offsets there, and lists in Arrow. Nothing is changed: "
        "what a format cannot say is an error that names the column. The file is written whole or "
        "not at all.",
    )
    parser.add_argument("source", metavar="IN", help="the file to read; - for a message")
    parser.add_argument("target", metavar="OUT", help="the file to write, replaced if it is there")
    parser.add_argument(
        "--columns", metavar="A,B", type=names, help="names of the only columns to convert"
    )
    parser.add_argument(
        "--no-meta", action="store_true", help="leave out what belongs to the whole batch"
    )
    parser.set_defaults(run=run, fail=parser.error)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from jagcodec._arguments import known_names
    from jagcodec.batch.describe import open_message
    from jagcodec.batch.exchange import FORMATS, batch_of_columns, columns_of_batch, format_of
    from jagcodec.wire.encoder import encode
    from jagcodec.wire.frames import file_path, write_file, write_whole
    from jagcodec.wire.wire_batch import open_whole

    if options.target == "-":
        options.fail("expected the name of a file to write, found -")
    source, target = format_of(options.source), format_of(options.target)
    if source is None and target is None:
        endings = ", ".join(ending for each in FORMATS for ending in each.endings)
        files = f"{display_name(options.source)} and {display_name(options.target)}"
        options.fail(f"expected a file whose name ends in one of {endings}, found {files}")
    with naming(options.source):
        if source is None:
            message = read_message(options.source)
            batch = open_whole(message, display_name(options.source))
            if not options.no_meta:
                _check_alone(open_message(message, display_name(options.source)))
            if options.columns is not None:
                batch = batch.select(options.columns)
            found = columns_of_batch(batch)
        else:
            found = source.read(head_and_rest(options.source)[0])
            if options.columns is not None:
                listed = known_names(options.columns, found.columns, "columns")
                found = found._replace(columns={name: found.columns[name] for name in listed})
    if options.no_meta:
        found = found._replace(meta={})
    where = file_path(options.target, "OUT", "a file to write")
    with naming(options.target):
        if target is None:
            write_file(where, encode(batch_of_columns(found), meta=found.meta or None), where)
        else:
            write_whole(where, [target.write(found)], where)
    rows, columns = counted(found.rows, "row"), counted(len(found.columns), "column")
    print(f"{display_name(options.target)}: {rows}, {columns}")
    return 0


def _check_alone(found: OpenMessage) -> None:
    """Refuse a message with values beside its batch, which no other format has a place for."""
    from jagcodec.wire.decoder import build

    beside = [
        entry.name
        for entry in found.beside
        # As the `meta_info` of a `BatchedDataDict` is most often.
        if entry.node.kind is not Kind.VALUE or build(found.message, entry.node) != {}
    ]
    if beside:
        raise ArgumentError(
            "bad_type",
            beside[0],
            f"expected a batch with nothing beside it, found {counted(len(beside), 'value')}; "
            "--no-meta leaves out what belongs to the whole batch",
        )
