"""Messages over ZeroMQ: one multipart message each, without copying large tensors.

Send what `encode`, `encode_fields` or `encode_rows` returned, and give what arrives to `decode`,
`open_wire` or `materialize`. Functions for sync and for asyncio sockets share `_send` and `_recv`,
whose helpers follow in the order of use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from inspect import isawaitable
from typing import Any, NamedTuple, TypeVar

from jagcodec._arguments import items_of
from jagcodec._compiling import untraced
from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    TransportError,
    TransportTimeoutError,
    WireFormatError,
    brief,
)
from jagcodec.integrations import needed
from jagcodec.memory.buffers import Buffer
from jagcodec.wire.frames import begins_message

with needed(__name__, "pyzmq: pip install 'pyzmq>=25'"):
    import zmq
    import zmq.asyncio

__all__ = ["Received", "async_recv_frames", "async_send_frames", "recv_frames", "send_frames"]


class Received(NamedTuple):
    """A received message that has not been decoded.

    Attributes:
        envelope: The frames before the message: the sender's identity on a ROUTER socket (and the
            empty delimiter of a REQ), the topic on a SUB socket if there is one, otherwise
            nothing. Reply with ``send_frames(socket, frames, envelope=envelope)``.
        frames: The message, for `jagcodec.decode` or `jagcodec.open_wire`.
    """

    envelope: list[bytes]
    frames: list[zmq.Frame]


@untraced
def send_frames(
    socket: zmq.Socket[Any],
    frames: Sequence[Buffer],
    *,
    envelope: bytes | Sequence[bytes] = (),
    timeout: float | None = None,
) -> zmq.MessageTracker:
    """Send the frames of a message, all of them or none.

    Example:
        >>> import zmq
        >>> from jagcodec import decode, encode
        >>> from jagcodec.integrations.zmq import recv_frames, send_frames
        >>> with zmq.Context() as context:
        ...     with context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        ...         port = push.bind_to_random_port("tcp://127.0.0.1")
        ...         _ = pull.connect(f"tcp://127.0.0.1:{port}")
        ...         _ = send_frames(push, encode({"step": 3}), timeout=10)
        ...         decode(recv_frames(pull, timeout=10).frames)
        {'step': 3}

    Args:
        socket: Any socket that sends multipart messages; a ROUTER gets ``ROUTER_MANDATORY``.
        frames: What `encode`, `encode_fields` or `encode_rows` returned.
        envelope: Frames to send before the message: the envelope that `recv_frames` returned, a
            peer's identity, or the topic of a PUB socket.
        timeout: Seconds to wait while the high-water mark is reached or no peer is connected; 0
            does not wait. None: the socket's own ``SNDTIMEO``. PUB and XPUB never wait: libzmq
            drops messages for subscribers that are too slow.

    Returns:
        A tracker. Frames of 64 KiB and more alias the encoded tensors, and keep them alive: write
        to these only after ``tracker.wait()``, or when ``tracker.done`` is true.

    Raises:
        TransportTimeoutError: The message could not be queued in time; nothing was sent.
        TransportError: A ROUTER has no peer with this identity; nothing was sent.
        ArgumentError: `timeout` is not a valid number of seconds, or a ROUTER got no envelope.
        ArgumentTypeError: This is an asyncio socket, or `envelope` is not bytes.
        zmq.ZMQError: The socket is closed, or it is not its turn to send (REQ, REP).
    """
    return _run_without_wait(_send(socket, frames, envelope, timeout, "send_frames"))


@untraced
def recv_frames(socket: zmq.Socket[Any], *, timeout: float | None = None) -> Received:
    """Receive a message without decoding it: its envelope and its frames.

    Example:
        >>> import zmq
        >>> from jagcodec import decode, encode
        >>> from jagcodec.integrations.zmq import recv_frames, send_frames
        >>> with zmq.Context() as context:
        ...     with context.socket(zmq.ROUTER) as server, context.socket(zmq.DEALER) as client:
        ...         port = server.bind_to_random_port("tcp://127.0.0.1")
        ...         _ = client.connect(f"tcp://127.0.0.1:{port}")
        ...         _ = send_frames(client, encode([1, 2]), timeout=10)
        ...         envelope, frames = recv_frames(server, timeout=10)
        ...         _ = send_frames(server, encode(sum(decode(frames))), envelope=envelope)
        ...         decode(recv_frames(client, timeout=10).frames)
        3

    Args:
        socket: Any socket that receives multipart messages.
        timeout: Seconds to wait for a message; 0 does not wait. None: the socket's ``RCVTIMEO``.

    Returns:
        The envelope and the frames. Their memory belongs to this process; over ``inproc://`` it is
        the sender's, so decode with ``copy=True`` there to write to the tensors.

    Raises:
        TransportTimeoutError: No message arrived in time.
        WireFormatError: The message has too many small frames. The next message can be received.
        ArgumentError, ArgumentTypeError, zmq.ZMQError: As `send_frames`.
    """
    return _run_without_wait(_recv(socket, timeout, "recv_frames"))


@untraced
async def async_send_frames(
    socket: zmq.asyncio.Socket,
    frames: Sequence[Buffer],
    *,
    envelope: bytes | Sequence[bytes] = (),
    timeout: float | None = None,
) -> zmq.MessageTracker:
    """`send_frames` on a `zmq.asyncio` socket. One that is cancelled while it waits sends nothing.

    Example:
        >>> import asyncio, zmq, zmq.asyncio
        >>> from jagcodec import decode, encode
        >>> from jagcodec.integrations.zmq import async_recv_frames, async_send_frames
        >>> async def main():
        ...     with zmq.asyncio.Context() as context:
        ...         with context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        ...             port = push.bind_to_random_port("tcp://127.0.0.1")
        ...             _ = pull.connect(f"tcp://127.0.0.1:{port}")
        ...             await async_send_frames(push, encode({"step": 3}), timeout=10)
        ...             return decode((await async_recv_frames(pull, timeout=10)).frames)
        >>> asyncio.run(main())
        {'step': 3}
    """
    return await _send(socket, frames, envelope, timeout, "async_send_frames")


@untraced
async def async_recv_frames(
    socket: zmq.asyncio.Socket, *, timeout: float | None = None
) -> Received:
    """`recv_frames` on a `zmq.asyncio` socket. A call that is cancelled has taken no message.

    Example:
        See `async_send_frames`.
    """
    return await _recv(socket, timeout, "async_recv_frames")


# --- sockets of both kinds ---------------------------------------------------------------------

# A message may have `MOST_SMALL_FRAMES` frames, and one more for every `BYTES_PER_FRAME` bytes.
MOST_SMALL_FRAMES, BYTES_PER_FRAME = 1024, 64

_LONGEST_TIMEOUT = (2**31 - 1) // 1000  # seconds: libzmq counts milliseconds in an int

T = TypeVar("T")


def _run_without_wait(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine on a sync socket, which never has to be awaited."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a sync socket had to be awaited")


async def _send(
    socket: Any, frames: Sequence[Any], envelope: Any, timeout: float | None, where: str
) -> zmq.MessageTracker:
    _check_socket(socket, timeout, where)
    expected, path = "bytes, or a list of them", f"{where}(envelope)"
    leading = [envelope] if isinstance(envelope, bytes) else items_of(envelope, path, expected)
    if not all(isinstance(part, bytes) for part in leading):
        detail = f"expected {expected}, found {brief(envelope)}"
        raise ArgumentTypeError("bad_type", path, detail)
    if socket.type == zmq.ROUTER:
        if not leading:
            detail = "expected a peer's identity for this ROUTER, found none; pass its envelope"
            raise ArgumentError("bad_option", f"{where}(envelope)", detail)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # Make the frames here, because send_multipart tracks the last frame only. With copy=None,
    # pyzmq copies frames below its threshold: tracking such a frame costs more than copying it.
    parts = [zmq.Frame(memoryview(frame), track=True, copy=None) for frame in frames]
    no_room = "the high-water mark reached, or no peer connected; nothing was sent"
    with _peer_errors(where, timeout, "room for a message", no_room):
        # pyzmq's asyncio reads the time-out when the call is made, and then runs its own timer.
        with _timeout_set(socket, zmq.SNDTIMEO, timeout):
            sending = socket.send_multipart([*leading, *parts], copy=False)
        if isawaitable(sending):
            await sending
    return zmq.MessageTracker(*parts)


async def _recv(socket: Any, timeout: float | None, where: str) -> Received:
    _check_socket(socket, timeout, where)
    own_timeout = socket.getsockopt(zmq.RCVTIMEO)  # in milliseconds; -1 waits without end
    seconds = timeout
    if seconds is None:
        seconds = own_timeout / 1000 if own_timeout >= 0 else math.inf
    end = time.monotonic() + seconds
    with _peer_errors(where, timeout, "a message", "none"):
        parts = _parts_if_any(socket)
        while parts is None:
            await _wait_to_read(socket, end - time.monotonic())
            parts = _parts_if_any(socket)
        socket.get(zmq.EVENTS)  # wakes the caller that waits for the next message
        return _split_parts(socket, parts)


def _parts_if_any(socket: Any) -> list[zmq.Frame] | None:
    """All parts of the next message, without a wait, so that no other task can take some of them.

    None if there is no message yet.
    """
    try:
        return _receive_parts(socket)
    except zmq.Again:
        return None


async def _wait_to_read(socket: Any, seconds: float) -> None:
    """Wait until there may be a message, for so many seconds at most; zmq.Again without any."""
    if seconds <= 0:
        raise zmq.Again
    # Switch off the socket's own time-out: pyzmq's asyncio would make it the error of an inner
    # future, which no code reads if the caller is cancelled in the same moment. A poll ends alone.
    with _timeout_set(socket, zmq.RCVTIMEO, math.inf):
        ready = socket.poll(None if seconds == math.inf else math.ceil(1000 * seconds))
    if isawaitable(ready):
        await ready


def _receive_parts(socket: Any) -> list[zmq.Frame]:
    """All parts of the next message; an error if too many of them are small.

    Such a message is taken off the socket too, so that the next one can be received.
    """
    parts: list[zmq.Frame] = []
    size = count = 0
    too_many = False
    while not count or socket.getsockopt(zmq.RCVMORE):
        part: zmq.Frame = zmq.Socket.recv(socket, zmq.NOBLOCK, copy=False)
        count, size = count + 1, size + len(part)
        # Each part needs hundreds of bytes here, however few it had on the way.
        too_many = too_many or count > MOST_SMALL_FRAMES + size // BYTES_PER_FRAME
        if too_many:
            parts.clear()
        else:
            parts.append(part)
    if too_many:
        limit = f"{MOST_SMALL_FRAMES} frames, and one more for every {BYTES_PER_FRAME} bytes"
        detail = f"expected at most {limit}, found {count} with {size} bytes"
        raise WireFormatError("frame_count", "frames", detail)
    return parts


def _split_parts(socket: Any, parts: list[zmq.Frame]) -> Received:
    """Split the parts where the message begins."""
    # Skip the identity, a ROUTER's first frame: its peer may choose one that looks like a message.
    after_identity = begin = 1 if socket.type == zmq.ROUTER else 0
    if len(parts) > begin + 1 and not len(parts[begin]):
        begin += 1  # skip a delimiter; if no message is found below, `decode` rejects the rest
    for i in range(after_identity, len(parts)):
        if begins_message(parts[i].buffer):
            begin = i
            break
    return Received([part.bytes for part in parts[:begin]], parts[begin:])


@contextmanager
def _peer_errors(where: str, timeout: float | None, expected: str, found: str) -> Iterator[None]:
    """Turn pyzmq's errors about the peer into ours; leave those about the socket alone."""
    try:
        yield
    except zmq.Again as error:
        limit = "the socket's own time-out" if timeout is None else f"{timeout:g} s"
        detail = f"expected {expected} within {limit}, found {found}"
        raise TransportTimeoutError("timed_out", f"{where}(socket)", detail) from error
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        detail = "expected the identity of a connected peer, found another; nothing was sent"
        raise TransportError("no_peer", f"{where}(envelope)", detail) from error


@contextmanager
def _timeout_set(socket: Any, option: int, timeout: float | None) -> Iterator[None]:
    """Set the time-out of a socket for one call; infinity waits without end."""
    if timeout is None:
        yield
        return
    own_timeout = socket.getsockopt(option)
    socket.setsockopt(option, -1 if timeout == math.inf else math.ceil(1000 * timeout))
    try:
        yield
    finally:
        if not socket.closed:
            socket.setsockopt(option, own_timeout)


def _check_socket(socket: Any, timeout: Any, where: str) -> None:
    """Raise an error for a socket of the other kind, or a time-out that is not valid seconds."""
    if isinstance(socket, zmq.asyncio.Socket) != where.startswith("async_"):
        name, kind = where.removeprefix("async_"), type(socket).__module__
        detail = f"expected another kind of socket, found one of {kind}; use {name} with "
        detail += f"zmq.Context, and async_{name} with zmq.asyncio.Context"
        raise ArgumentTypeError("bad_type", f"{where}(socket)", detail)
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 <= timeout <= _LONGEST_TIMEOUT):
        detail = f"expected seconds from 0 to {_LONGEST_TIMEOUT}, or None, found {timeout!r:.80}"
        raise ArgumentError("bad_option", f"{where}(timeout)", detail)
