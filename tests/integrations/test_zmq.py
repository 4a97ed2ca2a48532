"""ZeroMQ: real sockets, of `zmq` and of `zmq.asyncio`, and peers that do not play along."""

import asyncio
import contextlib
import gc
import inspect
import pickle
import re
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
import zmq
import zmq.asyncio

from jagcodec import ArgumentError, WireFormatError, decode, encode, to_blob
from jagcodec.errors import ArgumentTypeError, TransportError, TransportTimeoutError
from jagcodec.integrations import zmq as integration
from tests.odd import Endless
from tests.oracle import assert_same

LONG = 30  # seconds, for what must come
SHORT = 0.05  # for what must not
LARGE = 1 << 20  # cells: frames of this many bytes are never copied
HOST = "tcp://127.0.0.1"


class Net:
    """A context, and the functions for its sockets."""

    def __init__(self, of_asyncio=False):
        self.prefix = "async_" if of_asyncio else ""
        self.context: Any = (zmq.asyncio if of_asyncio else zmq).Context()
        self.runner = asyncio.Runner()
        self.open: list[Any] = []

    def run(self, call, *arguments, **options):
        """What a call returns, made in the loop: a socket of asyncio belongs to it."""

        async def main():
            found = call(*arguments, **options)
            return await found if inspect.isawaitable(found) else found

        return self.runner.run(main())

    def socket(self, kind, **options):
        socket = self.run(self.context.socket, kind)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        self.open.append(socket)
        return socket

    def joined(self, one, other, **options):
        """Two connected sockets over TCP."""
        first, second = self.socket(one, **options), self.socket(other, **options)
        second.connect(f"{HOST}:{first.bind_to_random_port(HOST)}")
        return first, second

    def close(self):
        """Without waiting for anyone."""
        self.run(self.context.destroy, linger=0)
        self.runner.close()

    def recv_frames(self, socket, **options):
        return self.run(getattr(integration, f"{self.prefix}recv_frames"), socket, **options)

    def recv(self, socket, **options):
        return decode(self.recv_frames(socket, **options).frames)

    def send(self, socket, value, **options):
        send = getattr(integration, f"{self.prefix}send_frames")
        return self.run(send, socket, encode(value), **options)

    def silent(self, socket):
        with pytest.raises(TransportTimeoutError):
            self.recv_frames(socket, timeout=SHORT)


@pytest.fixture(params=[False, True], ids=["sync", "asyncio"])
def net(request):
    with contextlib.closing(Net(request.param)) as net:
        yield net


@pytest.mark.parametrize(
    ("inproc", "copy", "kept"),
    [(False, None, "received"), (True, None, "sent"), (True, True, "own")],
)
def test_tensors_lie_in_the_frames_which_inproc_shares_unless_copied(net, inproc, copy, kept):
    if inproc:
        left, right = net.socket(zmq.PAIR), net.socket(zmq.PAIR)
        left.bind("inproc://shared")
        right.connect("inproc://shared")
    else:
        left, right = net.joined(zmq.PAIR, zmq.PAIR)
    sent = torch.arange(LARGE)
    net.send(left, sent, timeout=LONG)
    frames = net.recv_frames(right, timeout=LONG).frames
    back = decode(frames, copy=copy)
    assert torch.equal(back, sent)
    start = np.frombuffer(frames[-1].buffer, dtype=np.uint8).ctypes.data
    assert (start <= back.data_ptr() < start + len(frames[-1])) is (kept != "own")
    assert (back.data_ptr() == sent.data_ptr()) is (kept == "sent")


def test_the_tracker_waits_for_every_frame(net):
    left, right = net.joined(zmq.PUSH, zmq.PULL, SNDBUF=4096, RCVBUF=4096, RCVHWM=1)
    # More than the buffers of two sockets hold; the last frame is so small that it is copied.
    value = [torch.arange(4 * LARGE), torch.arange(3000)]
    assert len(encode(value)[-1]) == 24000
    trackers = [net.send(left, value, timeout=LONG) for _ in range(2)]
    assert not trackers[-1].done
    with pytest.raises(zmq.NotDone):
        trackers[-1].wait(timeout=SHORT)
    for _ in trackers:
        assert_same(net.recv(right, timeout=LONG), value)
    for tracker in trackers:
        tracker.wait(timeout=LONG)
        assert tracker.done


def test_nothing_comes_and_there_is_no_peer(net):
    push, pull = net.socket(zmq.PUSH), net.socket(zmq.PULL)
    port = push.bind_to_random_port(HOST)
    where = f"{net.prefix}send_frames(socket): expected room for a message within 0.01 s"
    with pytest.raises(TransportTimeoutError, match=re.escape(where) + ".*nothing was sent"):
        net.send(push, 1, timeout=0.01)
    pull.connect(f"{HOST}:{port}")
    for timeout in (0, 0.01):
        where = f"{net.prefix}recv_frames(socket): expected a message within {timeout} s, found"
        with pytest.raises(TransportTimeoutError, match=re.escape(where)) as caught:
            net.recv(pull, timeout=timeout)
        assert caught.value.reason == "timed_out"
    pull.setsockopt(zmq.RCVTIMEO, 10)
    with pytest.raises(TransportTimeoutError, match="the socket's own time-out"):
        net.recv(pull)
    net.send(push, 2, timeout=LONG)
    assert net.recv(pull, timeout=LONG) == 2


def test_at_the_high_water_mark_messages_are_sent_whole_or_not_at_all(net):
    small = {"SNDHWM": 1, "RCVHWM": 1, "SNDBUF": 4096, "RCVBUF": 4096}
    left, right = net.joined(zmq.PUSH, zmq.PULL, **small)
    sent = 0
    with pytest.raises(TransportTimeoutError, match="high-water mark"):  # noqa: PT012
        while True:
            value = [torch.full((LARGE,), sent), torch.arange(3000), "end"]
            net.send(left, value, timeout=0.2)
            sent += 1
    assert sent
    for number in range(sent):
        first, _, end = net.recv(right, timeout=LONG)
        assert (first[0], first[-1], end) == (number, number, "end")
    net.silent(right)
    net.send(left, "after", timeout=LONG)
    assert net.recv(right, timeout=LONG) == "after"


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "1", True, 2147484])
def test_arguments_that_are_not_valid_send_nothing(net, timeout):
    left, right = net.joined(zmq.PAIR, zmq.PAIR)
    with pytest.raises(ArgumentError, match=r"recv_frames\(timeout\): expected seconds from 0 to"):
        net.recv(right, timeout=timeout)
    with pytest.raises(ArgumentError, match=r"send_frames\(timeout\): expected seconds from 0 to"):
        net.send(left, 1, timeout=timeout)
    for envelope in (["text"], "text", 5, None, Endless()):
        with pytest.raises(ArgumentTypeError, match="envelope"):
            net.send(left, 1, envelope=envelope, timeout=LONG)
    net.silent(right)


def test_the_sockets_own_time_outs_are_kept_and_errors_stay_pyzmqs(net):
    left, right = net.joined(zmq.PAIR, zmq.PAIR, RCVTIMEO=1234, SNDTIMEO=4321)
    net.send(left, 1, timeout=2147483)
    net.recv(right, timeout=2147483)
    with pytest.raises(TransportTimeoutError):
        net.recv(right, timeout=0)
    for socket in (left, right):
        assert (socket.getsockopt(zmq.RCVTIMEO), socket.getsockopt(zmq.SNDTIMEO)) == (1234, 4321)
    net.run(right.close, linger=0)
    for socket, text in ((right, "non-socket"), (net.socket(zmq.REQ), "current state")):
        with pytest.raises(zmq.ZMQError, match=text):
            net.recv(socket, timeout=SHORT)


@pytest.mark.parametrize(("kind", "frames"), [(zmq.DEALER, 1), (zmq.REQ, 2)])
def test_a_router_answers_whom_it_heard(net, kind, frames):
    server = net.socket(zmq.ROUTER)
    port = server.bind_to_random_port(HOST)
    clients = []
    for number in range(3):  # identities that look like headers
        clients.append(net.socket(kind, ROUTING_ID=b"\x84\xa8jagcodec-%d" % number))
        clients[-1].connect(f"{HOST}:{port}")
        net.send(clients[-1], torch.full((5,), number), timeout=LONG)
    for _ in clients:
        envelope, message = net.recv_frames(server, timeout=LONG)
        assert len(envelope) == frames
        net.send(server, decode(message) * 10, envelope=envelope, timeout=LONG)
    for number, client in enumerate(clients):
        assert net.recv(client, timeout=LONG).tolist() == [10 * number] * 5


def test_a_blob_is_a_message_and_envelopes_of_several_hops_come_and_go_whole(net):
    server, client = net.joined(zmq.ROUTER, zmq.DEALER)
    net.run(client.send_multipart, [to_blob(encode([1, (2,)]))])
    envelope, frames = net.recv_frames(server, timeout=LONG)
    assert (len(envelope), decode(frames)) == (1, [1, (2,)])
    hops = [b"broker", b"", b"", b"worker", b""]
    for value in (7, torch.arange(LARGE)):
        net.send(client, value, envelope=b"topic", timeout=LONG)
        assert net.recv_frames(server, timeout=LONG).envelope[1:] == [b"topic"]
        net.send(client, value, envelope=hops, timeout=LONG)
        envelope, frames = net.recv_frames(server, timeout=LONG)
        assert envelope[1:] == hops
        assert_same(decode(frames), value)
        net.send(server, value, envelope=envelope, timeout=LONG)
        found, frames = net.recv_frames(client, timeout=LONG)
        assert found == hops
        assert_same(decode(frames), value)


def test_what_a_router_cannot_route_is_an_error(net):
    server, client = net.joined(zmq.ROUTER, zmq.DEALER)
    with pytest.raises(TransportError) as caught:
        net.send(server, 1, envelope=b"nobody", timeout=LONG)
    assert caught.value.reason == "no_peer"
    assert caught.value.path == f"{net.prefix}send_frames(envelope)"
    with pytest.raises(ArgumentError, match="identity"):
        net.send(server, 1, timeout=LONG)
    net.silent(client)


GOOD = [bytes(frame) for frame in encode([torch.arange(3000), torch.arange(4000)])]
FOREIGN = [GOOD[:-1], [*GOOD[:-1], GOOD[-1][:-1]], GOOD[1:], GOOD * 2, [b""], [b"", b""]]
FOREIGN += [[b"hello"], [b"jagcodec"], [b"\x84\xa8jagcodec"], [bytes(64), bytes(64)]]
FOREIGN += [[b"topic", b"\x80\x04."], [pickle.dumps({"a": 1})]]


def test_a_foreign_message_is_refused_and_its_sender_is_known(net):
    server, client = net.joined(zmq.ROUTER, zmq.DEALER)
    for parts in FOREIGN:
        net.run(client.send_multipart, parts)
        net.send(client, "ours", timeout=LONG)
        envelope, frames = net.recv_frames(server, timeout=LONG)
        with pytest.raises(WireFormatError) as caught:
            decode(frames)
        net.send(server, {"error": str(caught.value)}, envelope=envelope[:1], timeout=LONG)
        assert list(net.recv(client, timeout=LONG)) == ["error"]
        assert net.recv(server, timeout=LONG) == "ours"


def test_a_message_of_very_many_small_frames_is_taken_and_not_kept(net):
    left, right = net.joined(zmq.DEALER, zmq.DEALER)
    many = 200_000
    for parts in ([b""] * many, [b"x"] * many, [bytes(64)] + [b""] * 1025, [b""] * 1025):
        net.run(left.send_multipart, parts)
        net.send(left, "ours", timeout=LONG)
        tracemalloc.start()
        try:
            with pytest.raises(WireFormatError) as caught:
                net.recv_frames(right, timeout=LONG)
            # Kept, they take some 300 bytes each.
            assert tracemalloc.get_traced_memory()[1] < 2 << 20
        finally:
            tracemalloc.stop()
        assert caught.value.reason == "frame_count"
        assert f"found {len(parts)} with" in caught.value.detail
        assert net.recv(right, timeout=LONG) == "ours"


def test_many_frames_that_hold_something_are_a_message(net):
    left, right = net.joined(zmq.PAIR, zmq.PAIR)
    for parts in ([b""] * 1024, [bytes(64)] * 5000, [bytes(1 << 20)] + [b""] * 9000):
        net.run(left.send_multipart, parts)
        envelope, frames = net.recv_frames(right, timeout=LONG)
        assert len(envelope) + len(frames) == len(parts)
    columns = [torch.zeros(16384, dtype=torch.uint8)] * 3000
    net.send(left, [column.clone() for column in columns], timeout=LONG)
    assert_same(net.recv(right, timeout=LONG), columns)


def test_sync_and_asyncio_sockets_are_told_apart():
    with contextlib.closing(Net()) as sync, contextlib.closing(Net(True)) as other:
        ours, theirs = sync.socket(zmq.PAIR), other.socket(zmq.PAIR)
        for net, socket in ((sync, theirs), (other, ours)):
            with pytest.raises(ArgumentTypeError, match=r"use send_frames .* async_send_frames "):
                net.send(socket, 1)
            with pytest.raises(ArgumentTypeError, match=r"use recv_frames .* async_recv_frames "):
                net.recv(socket)


def in_tasks(main):
    """Run a coroutine on two connected DEALER sockets of an asyncio context."""
    with contextlib.closing(Net(True)) as net:
        sockets = net.joined(zmq.DEALER, zmq.DEALER)
        return net.run(lambda: asyncio.wait_for(main(*sockets), LONG))


async def send(socket, value):
    await integration.async_send_frames(socket, encode(value), timeout=LONG)


async def recv(socket):
    return decode((await integration.async_recv_frames(socket, timeout=LONG)).frames)


async def cancelled(task):
    await asyncio.sleep(SHORT)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_sender_that_is_cancelled_has_sent_nothing():
    with contextlib.closing(Net(True)) as net:
        push, pull = net.socket(zmq.PUSH), net.socket(zmq.PULL)
        port = push.bind_to_random_port(HOST)
        net.run(lambda: cancelled(asyncio.create_task(send(push, 2))))
        pull.connect(f"{HOST}:{port}")
        net.send(push, 3, timeout=LONG)
        assert net.recv(pull, timeout=LONG) == 3
        net.silent(pull)


@pytest.mark.parametrize("own", [False, True], ids=["argument", "option"])
@pytest.mark.parametrize("wait", [0.5, 1, 1.5], ids=["before", "together", "after"])
@pytest.mark.parametrize("work", ["send", "recv"])
def test_a_call_that_is_cancelled_near_its_time_out_leaves_no_error_behind(work, wait, own):
    """Cancelled by `wait_for` before, with and after its own time-out, in one turn of the loop."""
    logged = []

    async def main(socket):
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: logged.append(context))
        call = getattr(integration, f"async_{work}_frames")
        arguments = [socket] if work == "recv" else [socket, encode(1)]
        waiting = call(*arguments, timeout=None if own else SHORT)
        loop.call_later(SHORT / 5, time.sleep, 2 * SHORT)  # until all timers are due
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waiting, wait * SHORT)
        for _ in range(5):
            await asyncio.sleep(0)
            gc.collect()

    with contextlib.closing(Net(True)) as net:
        milliseconds = int(1000 * SHORT)
        options = {"RCVTIMEO": milliseconds, "SNDTIMEO": milliseconds} if own else {}
        socket = net.socket(zmq.PULL if work == "recv" else zmq.PUSH, **options)
        socket.bind_to_random_port(HOST)
        net.run(main, socket)
    assert logged == []


@pytest.mark.parametrize("early", [True, False])
def test_many_tasks_that_receive_get_one_whole_message_each(early):
    values = [[torch.full((20_000,), i), torch.full((30_000,), -i)] for i in range(40)]

    async def main(left, right):
        await cancelled(asyncio.create_task(recv(right)))  # which takes no message
        tasks = [asyncio.create_task(recv(right)) for _ in values if early]
        await asyncio.sleep(SHORT)
        for i, value in enumerate(values):
            await send(left, value)
            if i % 7 == 0:  # some arrive together, and some alone
                await asyncio.sleep(0.01)
        tasks += [asyncio.create_task(recv(right)) for _ in values if not early]
        return await asyncio.gather(*tasks)

    found = sorted(in_tasks(main), key=lambda value: int(value[0][0]))
    assert_same(found, values)


def test_tasks_beside_pyzmqs_own_are_woken():
    async def main(left, right):
        ours = asyncio.create_task(recv(right))
        theirs = asyncio.ensure_future(right.recv_multipart())
        await asyncio.sleep(SHORT)
        for _ in range(2):
            await send(left, "for either")
        return await ours, decode(await theirs)

    assert in_tasks(main) == ("for either", "for either")
