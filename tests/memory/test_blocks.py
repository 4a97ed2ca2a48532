"""Large memory that is kept for the next batch: used again, never while someone holds it."""

import gc
import mmap
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch

from jagcodec import ArgumentError, encode_fields, materialize, open_wire
from jagcodec.memory import blocks
from jagcodec.memory.blocks import new_block

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


def address(array):
    return array.ctypes.data


def test_small_blocks_are_the_c_librarys():
    block = new_block(1000)
    assert block.data.shape == (1000,)
    assert block.data.flags.writeable
    assert not block.zeroed
    assert new_block(0).data.shape == (0,)


def test_a_new_one_is_zeroed_and_writable():
    block = new_block(40 * MB)
    assert block.zeroed
    assert len(block.data) == 40 * MB
    assert block.data.flags.writeable
    assert not block.data[::4096].any()
    assert not address(block.data) % mmap.PAGESIZE


def test_one_that_was_let_go_is_used_again_for_about_as_much():
    block = new_block(40 * MB)
    block.data[:] = 7
    place = address(block.data)
    del block
    again = new_block(60 * MB)
    assert address(again.data) == place
    assert not again.zeroed
    again.data[:] = 9
    assert (again.data == 9).all()


def test_not_for_much_more_or_less():
    block = new_block(70 * MB)
    place = address(block.data)
    del block
    held = [new_block(40 * MB), new_block(200 * MB)]
    assert all(each.zeroed and address(each.data) != place for each in held)


def test_one_of_a_size_is_kept():
    held = [new_block(40 * MB) for _ in range(3)]
    assert len({address(each.data) for each in held}) == 3
    del held
    assert [new.zeroed for new in [new_block(40 * MB), new_block(40 * MB)]] == [False, True]


def test_of_small_ones_as_many_are_kept_as_the_micro_batches_of_a_step():
    size = 300_000  # in rooms of 512 KiB
    held = [new_block(size) for _ in range(40)]
    assert all(block.zeroed for block in held)
    for block in held:
        block.data[:] = 1
    del held, block
    again = [new_block(size - i) for i in range(40)]
    assert sum(not block.zeroed for block in again) == 32
    assert len({address(block.data) for block in again}) == 40


def test_whoever_holds_very_many_takes_no_mapping_for_each():
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


def test_columns_of_one_batch_keep_it_each():
    ids = torch.arange(4 * MB).view(2048, 2048)
    lengths = torch.full((2048,), 2048)
    columns = {"ids": ids, "more": ids + 1}
    pads = {"ids": 0, "more": 0}
    frames = encode_fields(columns, lengths=lengths, token_aligned_fields=pads)
    batch = materialize(open_wire(frames), pad_value_dict=pads)
    more = batch["more"]
    del batch, frames
    other = materialize(
        open_wire(encode_fields(columns, lengths=lengths, token_aligned_fields=pads)),
        pad_value_dict=pads,
    )
    other["ids"].zero_()
    assert torch.equal(more, ids + 1)


def test_pads_are_written_to_memory_that_was_used_before():
    """New memory is zeroed, and pads of zero need not be written there; here they must be."""
    ids = torch.full((2048, 4096), 7)
    lengths = torch.where(torch.arange(2048) < 9, 4096, 500)
    pads = {"ids": 0}
    frames = encode_fields({"ids": ids}, lengths=lengths, token_aligned_fields=pads)
    block = new_block(64 * MB)
    block.data[:] = 255
    place = address(block.data)
    del block
    made = materialize(open_wire(frames), pad_value_dict=pads)["ids"]
    assert made.data_ptr() == place
    assert torch.equal(made, ids * (torch.arange(4096) < lengths[:, None]))


def test_threads_never_share_one():
    errors = []

    def work(mark):
        for _ in range(30):
            data = new_block(33 * MB).data
            data[::4096] = mark
            if not (data[::4096] == mark).all():
                errors.append(mark)
            del data

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


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


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_release_gives_memory_back():
    before = _resident()
    new_block(100 * MB).data[:] = 1
    assert not new_block(100 * MB).zeroed  # it was kept
    blocks.release()
    assert _resident() - before < 20 * MB
    assert new_block(100 * MB).zeroed


def test_what_is_kept_does_not_grow_with_batches():
    before = _resident()
    for i in range(60):
        new_block((33 + i % 30) * MB).data[:] = 1
    assert _resident() - before < 90 * MB


def _python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
def test_none_is_kept_where_that_is_asked_for():
    code = """
        from jagcodec.memory.blocks import new_block
        new_block(40 << 20).data[:] = 1
        print(new_block(40 << 20).zeroed)
    """
    assert _python(code, JAGCODEC_KEEP_BLOCKS="0").stdout.split() == ["True"]
    assert _python(code, JAGCODEC_KEEP_BLOCKS="1").stdout.split() == ["False"]


def test_an_unknown_choice_is_refused():
    with pytest.raises(ArgumentError, match="JAGCODEC_KEEP_BLOCKS: expected 0 or 1, found 'no'"):
        blocks._wanted("no")
    run = _python("from jagcodec import encode", JAGCODEC_KEEP_BLOCKS="no")
    assert "JAGCODEC_KEEP_BLOCKS: expected 0 or 1" in run.stderr
    assert run.returncode


@pytest.mark.slow
def test_a_limit_on_addresses_is_met_without_the_room_behind():
    code = """
        import resource
        from jagcodec.memory.blocks import new_block
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (180 << 20),) * 2)
        data = new_block(140 << 20).data  # in a room of 256 MiB
        data[:] = 1
        print(len(data) >> 20)
        try:
            new_block(140 << 20)
        except MemoryError:
            print("MemoryError")
    """
    assert _python(code).stdout.split() == ["140", "MemoryError"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [300, 5000])  # in MiB: of those that are kept, and larger
def test_a_limit_on_addresses_is_met_with_those_of_what_is_kept(size):
    """What is lent to the system takes no memory, but still counts towards such limits."""
    code = f"""
        import resource
        from jagcodec.memory import blocks
        from jagcodec.memory.blocks import new_block
        held = [new_block(kept << 20) for kept in (40, 100, 1500, 3000)]  # 6.5 GB of addresses
        held.clear()
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20),) * 2)
        print(len(new_block({size} << 20).data) >> 20)
    """
    assert _python(code).stdout.split() == [str(size)]


def test_ctrl_c_while_a_block_is_returned_does_not_leak_it(monkeypatch):
    """Wherever it comes: before the first step, the next to take a block returns it."""

    def interrupted(loan):
        raise KeyboardInterrupt

    swallowed = []
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)
    returned = blocks._returned
    monkeypatch.setattr(blocks, "_returned", interrupted)
    block = new_block(40 * MB)
    place = address(block.data)
    del block
    assert len(swallowed) == 1
    monkeypatch.setattr(blocks, "_returned", returned)
    assert address(new_block(40 * MB).data) == place
    assert not blocks._loans

    class Interrupting(mmap.mmap):
        def madvise(self, *args):
            raise KeyboardInterrupt

    monkeypatch.setattr(blocks, "_mapped", lambda room: Interrupting(-1, room))
    blocks.release()
    block = new_block(40 * MB)
    del block
    assert len(swallowed) == 2
    assert not blocks._loans
    assert not any(blocks._kept.values())
