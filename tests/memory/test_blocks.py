"""Large memory that is kept for the next batch: used again, never while someone holds it."""

import gc
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from jagcodec import ArgumentError, encode_fields, materialize, open_wire
from jagcodec.memory import blocks
from jagcodec.memory.blocks import new_block
from tests.helpers import address, run_python
from tests.wire.readers import status

MB = 2**20

pytestmark = pytest.mark.skipif(
    not hasattr(mmap, "MADV_FREE"), reason="nothing is kept where memory cannot be lent back"
)


@pytest.fixture(autouse=True)
def _empty():
    gc.collect()
    blocks.release()
    yield
    gc.collect()
    blocks.release()


def test_a_new_one_is_zeroed_if_it_is_large_and_always_writable():
    large = new_block(40 * MB).data
    assert not large[::4096].any()
    assert not address(large) % mmap.PAGESIZE
    for size in (40 * MB, 1000, 0):
        data, zeroed = new_block(size)
        assert (zeroed, data.shape, data.flags.writeable) == (size > MB, (size,), True)


def test_one_that_was_let_go_is_used_again_for_about_as_much():
    block = new_block(40 * MB)
    block.data[:] = 7
    place = address(block.data)
    del block
    held = [new_block(20 * MB), new_block(200 * MB)]
    assert all(each.zeroed and address(each.data) != place for each in held)
    again = new_block(60 * MB)
    assert (address(again.data), again.zeroed) == (place, False)
    again.data[:] = 9
    assert (again.data == 9).all()


def test_one_large_block_of_a_size_is_kept_and_many_small_ones():
    """As many as the micro-batches of a step."""
    for size, made, kept in ((40 * MB, 3, 1), (300_000, 40, 32)):
        held = [new_block(size) for _ in range(made)]
        assert all(block.zeroed for block in held)
        assert len({address(block.data) for block in held}) == made
        held.clear()
        again = [new_block(size - i) for i in range(made)]
        assert sum(not block.zeroed for block in again) == kept
        assert len({address(block.data) for block in again}) == made


def test_very_many_blocks_take_no_mapping_for_each():
    held = [new_block(200_000) for _ in range(1500)]
    assert len(blocks._loans) == 1024
    assert len({address(block.data) for block in held}) == 1500
    new_block(40 * MB)
    assert not new_block(40 * MB).zeroed  # a large one is kept all the same
    held.clear()
    assert not blocks._loans


@pytest.mark.parametrize("hold", ["view", "tensor", "memoryview", "view of a view"])
def test_never_while_anything_refers_to_it(hold):
    block = new_block(40 * MB)
    block.data[:] = 1
    held = {
        "view": lambda part: part.view(np.int64).reshape(-1, 8),
        "tensor": lambda part: torch.from_numpy(part.view(np.float32)).view(-1, 4),
        "memoryview": memoryview,
        "view of a view": lambda part: np.asarray(part[10:][::2]).T,
    }[hold](block.data[5 * MB : 6 * MB])
    del block
    other = new_block(40 * MB)
    assert other.zeroed
    other.data[:] = 2
    cells = held.view(torch.uint8).numpy() if hold == "tensor" else np.asarray(held).view(np.uint8)
    assert (cells == 1).all()
    del held, cells
    assert not new_block(40 * MB).zeroed


def test_columns_of_batches_are_never_written_over_and_pads_always_written():
    """New memory is zeroed, so pads of zero need not be written there; in used memory they must."""
    ids = torch.arange(4 * MB).view(2048, 2048)
    lengths = torch.where(torch.arange(2048) < 9, 2048, 500)
    columns, pads = {"ids": ids, "more": ids + 1}, {"ids": 0, "more": 0}
    frames = encode_fields(columns, lengths=lengths, token_aligned_fields=pads)
    valid = torch.arange(2048) < lengths[:, None]

    first = materialize(open_wire(frames), pad_value_dict=pads)
    more = first["more"]
    first["ids"].fill_(255)
    del first
    second = materialize(open_wire(frames), pad_value_dict=pads)
    assert torch.equal(second["ids"], ids * valid)
    place = second["ids"].data_ptr()
    for column in second.values():
        column.fill_(255)
    assert torch.equal(more, (ids + 1) * valid)
    del second, column
    third = materialize(open_wire(frames), pad_value_dict=pads)
    assert third["ids"].data_ptr() == place
    assert torch.equal(third["ids"], ids * valid)


def test_threads_never_share_one():
    def work(mark):
        for _ in range(30):
            data = new_block(33 * MB).data
            data[::4096] = mark
            assert (data[::4096] == mark).all()
            del data

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(1, 5)))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_writes_to_memory_of_its_own():
    block = new_block(40 * MB)
    del block
    child = os.fork()
    if not child:
        data = new_block(40 * MB).data
        data[:] = 3
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    data = new_block(40 * MB).data
    data[:] = 5
    assert (data == 5).all()


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_release_gives_memory_back_and_what_is_kept_does_not_grow():
    before = status("VmRSS")
    new_block(100 * MB).data[:] = 1
    assert not new_block(100 * MB).zeroed  # it was kept
    blocks.release()
    assert status("VmRSS") - before < 20 * MB
    assert new_block(100 * MB).zeroed
    for i in range(60):
        new_block((33 + i % 30) * MB).data[:] = 1
    assert status("VmRSS") - before < 90 * MB


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "zeroed"), [("0", "True"), ("1", "False")])
def test_none_is_kept_where_that_is_asked_for(keep, zeroed):
    code = """
        from jagcodec.memory.blocks import new_block
        new_block(40 << 20).data[:] = 1
        print(new_block(40 << 20).zeroed)
    """
    assert run_python(code, JAGCODEC_KEEP_BLOCKS=keep).stdout.split() == [zeroed]


def test_an_unknown_choice_is_refused():
    with pytest.raises(ArgumentError, match="JAGCODEC_KEEP_BLOCKS: expected 0 or 1, found 'no'"):
        blocks._flag_of_environment("no")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "room", "sizes", "printed"),
    [
        ((), 180, (140, 140), "140 MemoryError"),  # of 256 MiB each, if there is room for that
        # What is lent to the system takes no memory, but counts towards such limits.
        ((40, 100, 1500, 3000), 40, (300,), "300"),
        ((40, 100, 1500, 3000), 40, (5000,), "5000"),  # larger than what is kept
    ],
)
def test_a_limit_on_addresses_is_met(kept, room, sizes, printed):
    code = f"""
        import resource
        from jagcodec.memory.blocks import new_block
        held = [new_block(size << 20) for size in {kept}]
        held.clear()
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + ({room} << 20),) * 2)
        try:
            for size in {sizes}:
                held.append(new_block(size << 20).data)
                held[-1][:4096] = 1
                print(len(held[-1]) >> 20)
        except MemoryError:
            print("MemoryError")
    """
    assert run_python(code).stdout.split() == printed.split()


def test_ctrl_c_while_a_block_is_returned_does_not_leak_it(monkeypatch):
    """Wherever it comes: before the first step, the next to take a block returns it."""

    def interrupted(loan):
        raise KeyboardInterrupt

    swallowed = []
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)
    returned = blocks._return_block
    monkeypatch.setattr(blocks, "_return_block", interrupted)
    block = new_block(40 * MB)
    place = address(block.data)
    del block
    assert len(swallowed) == 1
    monkeypatch.setattr(blocks, "_return_block", returned)
    assert address(new_block(40 * MB).data) == place
    assert not blocks._loans

    class Interrupting(mmap.mmap):
        def madvise(self, *args):
            raise KeyboardInterrupt

    monkeypatch.setattr(blocks, "_map_pages", lambda room: Interrupting(-1, room))
    blocks.release()
    block = new_block(40 * MB)
    del block
    assert len(swallowed) == 2
    assert not blocks._loans
    assert not any(blocks._spares.values())
