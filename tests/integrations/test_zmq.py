"""ZeroMQ: values over real sockets, and what happens when the other side does not play along."""

from __future__ import annotations

import asyncio
import pickle
import tracemalloc

import numpy as np
import pytest
import torch
import zmq
import zmq.asyncio
from hypothesis import given, settings

from jagcodec import (
    ArgumentError,
    JagcodecError,
    WireFormatError,
    decode,
    encode,
    open_wire,
    pack_jagged_fields,
    to_blob,
)
from jagcodec.errors import ArgumentTypeError, TransportError, TransportTimeoutError
from jagcodec.integrations.zmq import (
    async_recv_frames,
    async_send_frames,
    recv_frames,
    send_frames,
)
from tests.oracle import assert_same
from tests.strategies import trees

LONG = 30  # seconds, for what must come
SHORT = 0.05  # for what must not
LARGE = 1 << 20  # cells: frames of this many bytes are never copied
HOST = "tcp://127.0.0.1"


class Sockets:
    """A context that keeps its sockets, and closes them without waiting for anyone."""

    def __init__(self):
        self._context = zmq.Context()
        self._open = []

    def socket(self, kind):
        self._open.append(self._context.socket(kind))
        return self._open[-1]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for socket in self._open:
            socket.close(linger=0)
        self._context.term()


@pytest.fixture
def context():
    with Sockets() as context:
        yield context


def joined(context, one, other, **options):
    """Two connected sockets over TCP."""
    first, second = context.socket(one), context.socket(other)
    for socket in (first, second):
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
    second.connect(f"{HOST}:{first.bind_to_random_port(HOST)}")
    return first, second


def send(socket, value, **options):
    return send_frames(socket, encode(value), **options)


def recv(socket, **options):
    return decode(recv_frames(socket, **options).frames)


async def async_send(socket, value, **options):
    return await async_send_frames(socket, encode(value), **options)


async def async_recv(socket, **options):
    return decode((await async_recv_frames(socket, **options)).frames)


def assert_silent(socket):
    with pytest.raises(TransportTimeoutError):
        recv_frames(socket, timeout=SHORT)


# --- values ------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(value=trees())
def test_what_goes_in_comes_out(value):
    with Sockets() as context:
        left, right = joined(context, zmq.PAIR, zmq.PAIR)
        send(left, value, timeout=LONG)
        assert_same(recv(right, timeout=LONG), value)


def test_frames_can_be_opened_in_part_and_passed_on(context):
    left, middle = joined(context, zmq.PUSH, zmq.PULL)
    onward, right = joined(context, zmq.PUSH, zmq.PULL)
    lengths = torch.tensor([1, 3])
    fields = {"a": torch.ones(2, 3), "b": torch.arange(2)}
    td = pack_jagged_fields(fields, lengths=lengths, token_aligned_fields=["a"])
    send(left, td, timeout=LONG)
    send_frames(onward, recv_frames(middle, timeout=LONG).frames, timeout=LONG)
    part = open_wire(recv_frames(right, timeout=LONG).frames).select(["b"]).rows([1])
    assert part.to_tensordict()["b"].tolist() == [1]


def test_a_blob_in_one_frame_is_a_message(context):
    left, right = joined(context, zmq.DEALER, zmq.ROUTER)
    left.send(to_blob(encode([1, (2,)])))
    envelope, frames = recv_frames(right, timeout=LONG)
    assert (len(envelope), decode(frames)) == (1, [1, (2,)])


# --- memory ------------------------------------------------------------------------------------


def lies_in(tensor, frame):
    start = np.frombuffer(frame.buffer, dtype=np.uint8).ctypes.data
    return start <= tensor.data_ptr() < start + len(frame)


def test_received_tensors_lie_in_the_frames(context):
    left, right = joined(context, zmq.PAIR, zmq.PAIR)
    sent = torch.arange(LARGE)
    send(left, {"x": sent}, timeout=LONG)
    frames = recv_frames(right, timeout=LONG).frames
    back = decode(frames)["x"]
    assert torch.equal(back, sent)
    assert lies_in(back, frames[-1])
    assert back.data_ptr() != sent.data_ptr()


def test_the_tracker_waits_for_every_frame(context):
    left, right = joined(context, zmq.PUSH, zmq.PULL, SNDBUF=4096, RCVBUF=4096, RCVHWM=1)
    # More than the buffers of two sockets hold; the last frame is so small that it is copied.
    value = [torch.arange(4 * LARGE), torch.arange(3000)]
    assert len(encode(value)[-1]) == 24000
    trackers = [send(left, value, timeout=LONG) for _ in range(2)]
    assert not trackers[-1].done
    with pytest.raises(zmq.NotDone):
        trackers[-1].wait(timeout=SHORT)
    for _ in trackers:
        assert_same(recv(right, timeout=LONG), value)
    for tracker in trackers:
        tracker.wait(timeout=LONG)
        assert tracker.done


def test_over_inproc_memory_is_shared_unless_copied(context):
    left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    left.bind("inproc://shared")
    right.connect("inproc://shared")
    sent = torch.arange(LARGE)
    for copy, shared in ((None, True), (True, False)):
        send(left, sent, timeout=LONG)
        back = decode(recv_frames(right, timeout=LONG).frames, copy=copy)
        assert torch.equal(back, sent)
        assert (back.data_ptr() == sent.data_ptr()) is shared


# --- time-outs and high-water marks ------------------------------------------------------------


def test_nothing_comes(context):
    _, right = joined(context, zmq.PUSH, zmq.PULL)
    for timeout in (0, 0.01):
        with pytest.raises(TransportTimeoutError) as caught:
            recv(right, timeout=timeout)
        assert caught.value.reason == "timed_out"
        assert caught.value.path == "recv_frames(socket)"
        assert f"expected a message within {timeout} s, found none" in caught.value.detail
    right.setsockopt(zmq.RCVTIMEO, 10)
    with pytest.raises(TransportTimeoutError, match="the socket's own time-out"):
        recv(right)


def test_there_is_no_peer(context):
    socket = context.socket(zmq.PUSH)
    port = socket.bind_to_random_port(HOST)
    with pytest.raises(
        TransportTimeoutError, match=r"^send_frames\(socket\): expected room .* 0.01 s"
    ):
        send(socket, 1, timeout=0.01)
    with context.socket(zmq.PULL) as pull:
        pull.connect(f"{HOST}:{port}")
        assert_silent(pull)
        send(socket, 2, timeout=LONG)
        assert recv(pull, timeout=LONG) == 2
    socket.close(linger=0)


def test_at_the_high_water_mark_messages_are_sent_whole_or_not_at_all(context):
    left, right = joined(context, zmq.PUSH, zmq.PULL, SNDHWM=1, RCVHWM=1, SNDBUF=4096, RCVBUF=4096)
    sent = 0
    try:
        while sent < 1000:
            send(left, [torch.full((LARGE,), sent), torch.arange(3000), "end"], timeout=0.2)
            sent += 1
    except TransportTimeoutError as error:
        assert "high-water mark" in error.detail  # noqa: PT017
    assert 0 < sent < 1000
    for number in range(sent):
        first, _, end = recv(right, timeout=LONG)
        assert (first[0], first[-1], end) == (number, number, "end")
    assert_silent(right)
    send(left, "after", timeout=LONG)
    assert recv(right, timeout=LONG) == "after"


def test_an_envelope_that_is_not_bytes_sends_nothing(context):
    left, right = joined(context, zmq.PAIR, zmq.PAIR)
    with pytest.raises(ArgumentTypeError, match="envelope"):
        send(left, 1, envelope=["text"], timeout=LONG)
    assert_silent(right)


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "1", True, 1e10])
def test_time_outs_that_are_not_valid(context, timeout):
    left, right = joined(context, zmq.PAIR, zmq.PAIR)
    for call in (lambda: send(left, 1, timeout=timeout), lambda: recv(right, timeout=timeout)):
        with pytest.raises(ArgumentError, match="timeout"):
            call()
    assert_silent(right)


def test_the_sockets_own_time_outs_are_kept(context):
    left, right = joined(context, zmq.PAIR, zmq.PAIR, RCVTIMEO=1234, SNDTIMEO=4321)
    send(left, 1, timeout=LONG)
    recv(right, timeout=LONG)
    with pytest.raises(TransportTimeoutError):
        recv(right, timeout=0)
    for socket in (left, right):
        assert (socket.getsockopt(zmq.RCVTIMEO), socket.getsockopt(zmq.SNDTIMEO)) == (1234, 4321)


def test_the_time_out_error_is_what_python_users_expect():
    error = TransportTimeoutError("timed_out", "where", "what")
    assert isinstance(error, (TimeoutError, TransportError, JagcodecError))
    for found in (error, pickle.loads(pickle.dumps(error))):
        assert type(found) is TransportTimeoutError
        assert found.args == (found.reason, found.path, found.detail)
        assert found.args == ("timed_out", "where", "what")
        assert (str(found), found.errno, found.filename) == ("where: what", None, None)


def test_errors_of_the_socket_stay_pyzmqs(context):
    socket = context.socket(zmq.REQ)
    socket.bind_to_random_port(HOST)
    with pytest.raises(zmq.ZMQError, match="state"):
        recv(socket, timeout=SHORT)
    socket.close(linger=0)
    with pytest.raises(zmq.ZMQError):
        recv(socket, timeout=SHORT)


# --- envelopes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "frames"), [(zmq.DEALER, 1), (zmq.REQ, 2)])
def test_a_router_answers_whom_it_heard(context, kind, frames):
    server = context.socket(zmq.ROUTER)
    port = server.bind_to_random_port(HOST)
    clients = [context.socket(kind) for _ in range(3)]
    for number, client in enumerate(clients):
        client.setsockopt(zmq.ROUTING_ID, b"\x84\xa8jagcodec-%d" % number)  # looks like a header
        client.connect(f"{HOST}:{port}")
        send(client, torch.full((5,), number), timeout=LONG)
    for _ in clients:
        envelope, message = recv_frames(server, timeout=LONG)
        assert len(envelope) == frames
        send(server, decode(message) * 10, envelope=envelope, timeout=LONG)
    for number, client in enumerate(clients):
        assert recv(client, timeout=LONG).tolist() == [10 * number] * 5


def test_req_and_rep_need_no_envelope(context):
    rep, req = joined(context, zmq.REP, zmq.REQ)
    send(req, {"need": 3}, timeout=LONG)
    assert recv(rep, timeout=LONG) == {"need": 3}
    send(rep, (1, 2, 3), timeout=LONG)
    assert recv(req, timeout=LONG) == (1, 2, 3)


def test_envelopes_of_several_hops_come_and_go_whole(context):
    server, client = joined(context, zmq.ROUTER, zmq.DEALER)
    hops = [b"broker", b"", b"", b"worker", b""]
    for value in (7, torch.arange(LARGE)):
        send(client, value, envelope=hops, timeout=LONG)
        envelope, frames = recv_frames(server, timeout=LONG)
        assert envelope[1:] == hops
        assert_same(decode(frames), value)
        send(server, value, envelope=envelope, timeout=LONG)
        found, frames = recv_frames(client, timeout=LONG)
        assert found == hops
        assert_same(decode(frames), value)


def test_topics_stand_before_messages(context):
    publisher, subscriber = joined(context, zmq.XPUB, zmq.SUB)
    subscriber.subscribe(b"weights")
    assert publisher.recv() == b"\x01weights"
    for topic in (b"metrics", b"weights/7"):
        send(publisher, {"of": topic}, envelope=topic, timeout=LONG)
    envelope, frames = recv_frames(subscriber, timeout=LONG)
    assert (envelope, decode(frames)) == ([b"weights/7"], {"of": b"weights/7"})
    assert_silent(subscriber)


def test_what_a_router_cannot_route_is_an_error(context):
    server, client = joined(context, zmq.ROUTER, zmq.DEALER)
    with pytest.raises(TransportError) as caught:
        send(server, 1, envelope=b"nobody", timeout=LONG)
    assert (caught.value.reason, caught.value.path) == ("no_peer", "send_frames(envelope)")
    with pytest.raises(ArgumentError, match="identity"):
        send(server, 1, timeout=LONG)
    send(client, 1, timeout=LONG)
    envelope, _ = recv_frames(server, timeout=LONG)
    send(server, 2, envelope=envelope, timeout=LONG)
    assert recv(client, timeout=LONG) == 2


# --- foreign messages --------------------------------------------------------------------------

FOREIGN = [
    [b"hello"],
    [b""],
    [b"", b""],
    [pickle.dumps({"a": 1})],
    [b"topic", b"\x80\x04."],
    [b"\x84\xa8jagcodec"],
    [b"jagcodec"],
    [bytes(64), bytes(64)],
]


@pytest.mark.parametrize("parts", FOREIGN)
def test_a_foreign_message_is_refused_and_the_next_one_read(context, parts):
    left, right = joined(context, zmq.DEALER, zmq.DEALER)
    left.send_multipart(parts)
    send(left, "ours", timeout=LONG)
    with pytest.raises(WireFormatError):
        recv(right, timeout=LONG)
    assert recv(right, timeout=LONG) == "ours"


@pytest.mark.parametrize("parts", FOREIGN)
def test_a_server_knows_who_sent_a_foreign_message(context, parts):
    server, client = joined(context, zmq.ROUTER, zmq.DEALER)
    client.send_multipart(parts)
    envelope, frames = recv_frames(server, timeout=LONG)
    with pytest.raises(WireFormatError) as caught:
        decode(frames)
    send(server, {"error": str(caught.value)}, envelope=envelope[:1], timeout=LONG)
    assert list(recv(client, timeout=LONG)) == ["error"]


def test_lost_and_cut_frames_are_found(context):
    left, right = joined(context, zmq.PAIR, zmq.PAIR)
    frames = [bytes(frame) for frame in encode([torch.arange(3000), torch.arange(4000)])]
    for damaged in (frames[:-1], [*frames[:-1], frames[-1][:-1]], frames[1:], frames * 2):
        left.send_multipart(damaged)
        with pytest.raises(WireFormatError):
            recv(right, timeout=LONG)


def test_a_rep_answers_a_foreign_request_and_serves_the_next(context):
    rep, first = joined(context, zmq.REP, zmq.REQ)
    second = context.socket(zmq.REQ)
    second.connect(rep.getsockopt_string(zmq.LAST_ENDPOINT))
    first.send(b"hello")
    with pytest.raises(WireFormatError) as caught:
        recv(rep, timeout=LONG)
    with pytest.raises(zmq.ZMQError):  # it has to answer first
        recv(rep, timeout=LONG)
    send(rep, {"error": str(caught.value)}, timeout=LONG)
    assert list(recv(first, timeout=LONG)) == ["error"]
    send(second, 7, timeout=LONG)
    assert recv(rep, timeout=LONG) == 7


SMALL = 200_000


def test_a_message_of_very_many_small_frames_is_taken_and_not_kept(context):
    left, right = joined(context, zmq.DEALER, zmq.DEALER)
    for parts in ([b""] * SMALL, [b"x"] * SMALL, [bytes(64)] + [b""] * 1025):
        left.send_multipart(parts)
        send(left, "ours", timeout=LONG)
        tracemalloc.start()
        try:
            with pytest.raises(WireFormatError) as caught:
                recv_frames(right, timeout=LONG)
            # Kept, they take some 300 bytes each.
            assert tracemalloc.get_traced_memory()[1] < 2 << 20
        finally:
            tracemalloc.stop()
        assert caught.value.reason == "frame_count"
        assert f"found {len(parts)} with" in caught.value.detail
        assert recv(right, timeout=LONG) == "ours"


def test_many_frames_that_hold_something_are_a_message(context):
    left, right = joined(context, zmq.PAIR, zmq.PAIR)
    for parts in ([b""] * 1024, [bytes(64)] * 5000, [bytes(1 << 20)] + [b""] * 9000):
        left.send_multipart(parts)
        envelope, frames = recv_frames(right, timeout=LONG)
        assert len(envelope) + len(frames) == len(parts)
    columns = [torch.zeros(16384, dtype=torch.uint8)] * 3000
    send(left, [column.clone() for column in columns], timeout=LONG)
    assert_same(recv(right, timeout=LONG), columns)


# --- asyncio -----------------------------------------------------------------------------------


def run(main):
    """Run a coroutine on two connected DEALER sockets of an asyncio context."""

    async def bounded():
        with zmq.asyncio.Context() as context:
            left, right = joined(context, zmq.DEALER, zmq.DEALER)
            try:
                return await asyncio.wait_for(main(left, right), LONG)
            finally:
                left.close(linger=0)
                right.close(linger=0)

    return asyncio.run(bounded())


def test_asyncio_sends_and_receives():
    values = [torch.arange(LARGE), {"a": (1, None)}, np.arange(5, dtype=np.float32)]

    async def main(left, right):
        receiving = asyncio.create_task(async_recv(right, timeout=LONG))
        await asyncio.sleep(0)
        trackers = [await async_send(left, value, timeout=LONG) for value in values]
        found = [await receiving]
        for _ in values[1:]:
            found.append(await async_recv(right))
        await async_send_frames(left, encode("framed"), envelope=[b"e", b""], timeout=LONG)
        envelope, frames = await async_recv_frames(right, timeout=LONG)
        assert (envelope, decode(frames)) == ([b"e", b""], "framed")
        return found, trackers

    found, trackers = run(main)
    assert_same(found, values)
    for tracker in trackers:
        tracker.wait(timeout=LONG)


def test_asyncio_time_outs():
    async def main(left, right):
        right.setsockopt(zmq.RCVTIMEO, 7777)
        for timeout in (0, SHORT):
            with pytest.raises(TransportTimeoutError, match=r"^async_recv_frames\(socket\)"):
                await async_recv(right, timeout=timeout)
        assert right.getsockopt(zmq.RCVTIMEO) == 7777
        right.setsockopt(zmq.RCVTIMEO, 10)
        with pytest.raises(TransportTimeoutError, match="own time-out"):
            await async_recv(right)
        with pytest.raises(ArgumentError, match="timeout"):
            await async_recv(right, timeout=-1)
        await async_send(left, 1)
        assert await async_recv(right, timeout=LONG) == 1

    run(main)


def test_asyncio_without_a_peer_sends_nothing():
    async def main(left, right):
        with zmq.asyncio.Context() as context, context.socket(zmq.PUSH) as push:
            port = push.bind_to_random_port(HOST)
            with pytest.raises(TransportTimeoutError, match="nothing was sent"):
                await async_send(push, 1, timeout=SHORT)
            cancelled = asyncio.create_task(async_send(push, 2))
            await asyncio.sleep(SHORT)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            with context.socket(zmq.PULL) as pull:
                pull.connect(f"{HOST}:{port}")
                await async_send(push, 3, timeout=LONG)
                assert await async_recv(pull, timeout=LONG) == 3
                with pytest.raises(TransportTimeoutError):
                    await async_recv(pull, timeout=SHORT)

    run(main)


def test_a_receiver_that_is_cancelled_loses_no_message():
    async def main(left, right):
        waiting = asyncio.create_task(async_recv(right))
        await asyncio.sleep(SHORT)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await async_send(left, "first", timeout=LONG)
        assert await async_recv(right, timeout=LONG) == "first"

    run(main)


@pytest.mark.parametrize("early", [True, False])
def test_many_tasks_that_receive_get_one_whole_message_each(early):
    values = [[torch.full((20_000,), i), torch.full((30_000,), -i)] for i in range(40)]

    async def main(left, right):
        tasks = [asyncio.create_task(async_recv(right, timeout=LONG)) for _ in values if early]
        await asyncio.sleep(SHORT)
        for i, value in enumerate(values):
            await async_send(left, value, timeout=LONG)
            if i % 7 == 0:  # some arrive together, and some alone
                await asyncio.sleep(0.01)
        tasks += [asyncio.create_task(async_recv(right, timeout=LONG)) for _ in values if not early]
        return await asyncio.gather(*tasks)

    found = sorted(run(main), key=lambda value: int(value[0][0]))
    assert_same(found, values)


def test_tasks_beside_pyzmqs_own_are_woken():
    async def main(left, right):
        ours = asyncio.create_task(async_recv(right, timeout=LONG))
        theirs = asyncio.ensure_future(right.recv_multipart())
        await asyncio.sleep(SHORT)
        for _ in range(2):
            await async_send(left, "for either", timeout=LONG)
        return await ours, decode(await theirs)

    assert run(main) == ("for either", "for either")


def test_asyncio_takes_no_message_of_very_many_small_frames():
    async def main(left, right):
        await left.send_multipart([b""] * SMALL)
        await async_send(left, "kept", timeout=LONG)
        with pytest.raises(WireFormatError, match=f"found {SMALL} with 0 bytes"):
            await async_recv_frames(right, timeout=LONG)
        assert await async_recv(right, timeout=LONG) == "kept"

    run(main)


def test_sync_and_asyncio_sockets_are_told_apart(context):
    async def main(left, right):
        with pytest.raises(ArgumentTypeError, match="use async_send_frames for"):
            send_frames(left, [b""])
        with pytest.raises(ArgumentTypeError, match="use async_recv_frames for"):
            recv_frames(right)
        with pytest.raises(ArgumentTypeError, match="use send_frames for"):
            await async_send_frames(context.socket(zmq.PAIR), [b""])
        with pytest.raises(ArgumentTypeError, match="use recv_frames for"):
            await async_recv_frames(context.socket(zmq.PAIR))

    run(main)
