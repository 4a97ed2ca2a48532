"""Real processes killed while they send.

A message is cut at an exact byte by a relay between the two sides, which forwards so many bytes and
no more. `test_torch_distributed.py` kills ranks.
"""

import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch
import zmq

from jagcodec import decode, dump, encode, load, pack_rows
from jagcodec.errors import TransportTimeoutError
from jagcodec.integrations.zmq import recv_frames, send_frames
from tests.integrations.conftest import process
from tests.oracle import assert_same

LONG = 60  # seconds, for what must come
SHORT = 0.3  # for what must not
HOST = "127.0.0.1"
CELLS = 1 << 20  # of a column: more than the buffers of two sockets hold


def message_of(number):
    """A batch whose rows tell which one it is."""
    rows = [{"ids": torch.full((CELLS,), number), "message": {"number": number}}]
    rows += [{"ids": torch.full((1,), number), "message": None}]
    return {"number": number, "batch": pack_rows(rows)}


def send(to, message, timeout=LONG):
    return send_frames(to, encode(message), timeout=timeout)


def recv(source, timeout=LONG):
    return decode(recv_frames(source, timeout=timeout).frames)


def killed(running):
    """End it as the kernel ends a process that is out of memory."""
    os.kill(running.pid, signal.SIGKILL)
    running.join(LONG)
    assert running.exitcode == -signal.SIGKILL


@pytest.fixture
def context():
    with zmq.Context() as context:
        context.linger = 0
        yield context


@contextmanager
def relay(port, limit, of_answers=False):
    """A port that leads to another one, until the block ends, and an event.

    So many bytes of the side that connects are forwarded, or with `of_answers` of the other one;
    then nothing more, and the event is set.
    """
    listener, reached, ends = socket.create_server((HOST, 0)), threading.Event(), []

    def pump(source, target, left):
        with suppress(OSError):  # cut
            while left and (data := source.recv(min(left, 1 << 16))):
                target.sendall(data)
                left -= len(data)
            reached.set()

    def forward():
        ends.extend((listener.accept()[0], socket.create_connection((HOST, port))))
        limits = [1 << 40, limit] if of_answers else [limit, 1 << 40]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(pump, ends, ends[::-1], limits))

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], reached
    finally:
        for end in (listener, *ends):
            with suppress(OSError):  # ended already
                end.shutdown(socket.SHUT_RDWR)
        thread.join(LONG)
        for end in (listener, *ends):
            end.close()


INSIDE = {"the handshake": 20, "the header": 200, "a buffer": 1 << 20}


def produce(pipe, port, number):
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(f"tcp://{HOST}:{port}")
        send(push, message_of(number), timeout=LONG).wait(LONG)
        pipe.send("sent")


@pytest.mark.parametrize("limit", INSIDE.values(), ids=INSIDE)
def test_of_a_producer_killed_in_mid_message_nothing_arrives(context, limit):
    with context.socket(zmq.PULL) as pull:
        port = pull.bind_to_random_port(f"tcp://{HOST}")
        with relay(port, limit) as (way, reached), process(produce, way, 1) as (running, _):
            assert reached.wait(LONG)
            killed(running)
        with pytest.raises(TransportTimeoutError) as caught:
            recv(pull, timeout=SHORT)
        assert caught.value.reason == "timed_out"
        with process(produce, port, 2):
            assert_same(recv(pull, timeout=LONG), message_of(2))
        with pytest.raises(TransportTimeoutError):
            recv(pull, timeout=SHORT)


def consume(pipe, port):
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://{HOST}:{port}")
        pipe.send(recv(dealer)["number"])


@pytest.mark.parametrize("limit", [200, 1 << 20])
def test_a_producer_does_not_notice_that_a_consumer_was_killed_and_the_next_one_is_sent_all(
    context, limit
):
    with context.socket(zmq.DEALER) as dealer:
        port = dealer.bind_to_random_port(f"tcp://{HOST}")
        with (
            relay(port, limit, of_answers=True) as (way, reached),
            process(consume, way) as (running, pipe),
        ):
            tracker = send(dealer, message_of(1), timeout=LONG)
            assert reached.wait(LONG)
            killed(running)
            with pytest.raises(EOFError):
                pipe.recv()
        # Memory may be written to again; that does not say that anyone has the batch.
        tracker.wait(LONG)
        with process(consume, port) as (_, pipe):
            send(dealer, message_of(2), timeout=LONG)
            assert pipe.poll(LONG), "the other side hangs"
            assert pipe.recv() == 2


def read_while_it_shrinks(pipe, path):
    mapped = load(path, mmap=True)
    os.truncate(path, 4096)
    pipe.send(int(mapped["batch"]["ids"].values().sum()))


@pytest.mark.skipif(sys.platform != "linux", reason="how a process ends that reads past a mapping")
def test_a_mapped_file_that_shrinks_kills_its_reader_and_gives_no_wrong_value(tmp_path):
    path = tmp_path / "batch.jag"
    dump(message_of(1), path)
    with process(read_while_it_shrinks, path) as (running, pipe):
        running.join(LONG)
        assert running.exitcode == -signal.SIGBUS
        with pytest.raises(EOFError):
            pipe.recv()
