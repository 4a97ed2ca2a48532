"""Messages over ZeroMQ: one multipart message each, without copying large tensors.

`send_frames` and `recv_frames` work on sockets of `zmq.Context`, `async_send_frames` and
`async_recv_frames` on those of `zmq.asyncio.Context`. They neither encode nor decode: pass what
`encode`, `encode_fields` or `encode_rows` returned, and give what arrives to `decode`,
`open_wire` or `materialize`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    TransportError,
    TransportTimeoutError,
    WireFormatError,
)
from jagcodec.integrations._needed import needed
from jagcodec.memory.buffers import Buffer
from jagcodec.wire.spec import BLOB_MAGIC, MAGIC

with needed(__name__, "pyzmq: pip install 'pyzmq>=25'"):
    import zmq
    import zmq.asyncio

Envelope: TypeAlias = "bytes | Sequence[bytes]"
"""The frames before a message: peer identities, an empty delimiter, or a topic."""

__all__ = ["Received", "async_recv_frames", "async_send_frames", "recv_frames", "send_frames"]


class Received(NamedTuple):
    """A received message that has not been decoded.

    Attributes:
        envelope: The frames before the message: on a ROUTER socket the identity of the sender
            (and the empty delimiter of a REQ), on a SUB socket the topic if there is one,
            otherwise nothing. Reply with ``send_frames(socket, frames, envelope=envelope)``.
        frames: The message, for `jagcodec.decode` or `jagcodec.open_wire`.
    """

    envelope: list[bytes]
    frames: list[zmq.Frame]


# --- sync sockets ------------------------------------------------------------------------------


def send_frames(
    socket: zmq.Socket[Any],
    frames: Sequence[Buffer],
    *,
    envelope: Envelope = (),
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
        socket: A socket of any type that sends multipart messages. A ROUTER is made *mandatory*
            (``ROUTER_MANDATORY``), because it would otherwise silently drop messages that it
            cannot route.
        frames: What `encode`, `encode_fields` or `encode_rows` returned.
        envelope: Frames to send before the message: the envelope that `recv_frames` returned, a
            peer's identity, or the topic of a PUB socket.
        timeout: Seconds to wait while the high-water mark is reached or no peer is connected; 0
            does not wait. None: the socket's own ``SNDTIMEO``, by default no limit. PUB and XPUB
            never wait: libzmq drops messages for subscribers that are too slow.

    Returns:
        A tracker. Frames of 64 KiB and more alias the encoded tensors, and keep them alive: write
        to these only after ``tracker.wait()``, or when ``tracker.done`` is true. Over
        ``inproc://`` nothing is copied at all: the receiver gets the same memory.

    Raises:
        TransportTimeoutError: The message could not be queued in time; nothing was sent.
        TransportError: A ROUTER has no peer with this identity; nothing was sent.
        ArgumentError: `timeout` is not a valid number of seconds, or a ROUTER got no envelope.
        ArgumentTypeError: This is an asyncio socket, or `envelope` is neither bytes nor a list
            of bytes.
        zmq.ZMQError: The socket is closed, its context is terminated, or it is not its turn to
            send (REQ, REP).
    """
    where = "send_frames"
    _check(socket, where, of_asyncio=False)
    parts, tracker = _message(socket, frames, envelope, where)
    with _reported(where, _SENDING, timeout), _waiting(socket, zmq.SNDTIMEO, timeout, where):
        socket.send_multipart(parts, copy=False)
    return tracker


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
        ...         reply = encode(sum(decode(frames)))
        ...         _ = send_frames(server, reply, envelope=envelope, timeout=10)
        ...         decode(recv_frames(client, timeout=10).frames)
        3

    Args:
        socket: A socket of any type that receives multipart messages.
        timeout: Seconds to wait for a message; 0 does not wait. None: the socket's own
            ``RCVTIMEO``, by default no limit.

    Returns:
        The envelope and the frames, which hold the received memory. It belongs to this process,
        except over ``inproc://``, where it is the sender's: there, decode with ``copy=True`` to
        write to the tensors. `decode` and `open_wire` raise if the frames are not a jagcodec
        message; with the envelope, a server can still reply to the sender of such a message.

    Raises:
        TransportTimeoutError: No message arrived in time.
        WireFormatError: The message has more than `MOST_SMALL_FRAMES` frames beyond one for every
            `BYTES_PER_FRAME` bytes. It has been taken from the socket, which is ready for the
            next one. But a REP has to answer first, as ever.
        ArgumentError: `timeout` is not a valid number of seconds.
        ArgumentTypeError: This is an asyncio socket.
        zmq.ZMQError: The socket is closed, its context is terminated, or it is not its turn to
            receive (REQ, REP).
    """
    where = "recv_frames"
    _check(socket, where, of_asyncio=False)
    with _reported(where, _RECEIVING, timeout), _waiting(socket, zmq.RCVTIMEO, timeout, where):
        parts = _parts(socket, lambda: socket.recv(copy=False))
    return _opened(socket, parts)


# --- asyncio sockets ---------------------------------------------------------------------------


async def async_send_frames(
    socket: zmq.asyncio.Socket,
    frames: Sequence[Buffer],
    *,
    envelope: Envelope = (),
    timeout: float | None = None,
) -> zmq.MessageTracker:
    """`send_frames` on a `zmq.asyncio` socket. A call that is cancelled has sent nothing.

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
    where = "async_send_frames"
    _check(socket, where, of_asyncio=True)
    parts, tracker = _message(socket, frames, envelope, where)
    with _reported(where, _SENDING, timeout):
        # pyzmq reads the time-out when the call is made, and then runs its own timer.
        with _waiting(socket, zmq.SNDTIMEO, timeout, where):
            sending = socket.send_multipart(parts, copy=False)
        await sending
    return tracker


async def async_recv_frames(
    socket: zmq.asyncio.Socket, *, timeout: float | None = None
) -> Received:
    """`recv_frames` on a `zmq.asyncio` socket. A call that is cancelled has taken no message.

    Example:
        See `async_send_frames`.
    """
    _check(socket, "async_recv_frames", of_asyncio=True)
    return _opened(socket, await _async_parts(socket, timeout, "async_recv_frames"))


async def _async_parts(socket: Any, timeout: float | None, where: str) -> list[zmq.Frame]:
    _check_timeout(timeout, where)
    own = socket.getsockopt(zmq.RCVTIMEO)
    limit = timeout if timeout is not None else own / 1000 if own >= 0 else math.inf
    clock = asyncio.get_running_loop().time
    end = clock() + limit
    with _reported(where, _RECEIVING, timeout):
        while True:
            try:
                # Without a wait, so that no other task can take parts of this message.
                parts = _parts(socket, lambda: socket.recv(zmq.NOBLOCK, copy=False).result())
            except zmq.Again:
                left = end - clock()
                if left <= 0:
                    raise
                with _waiting(socket, zmq.RCVTIMEO, left if left < math.inf else None, where):
                    message = socket.poll()
                await message
            else:
                socket.get(zmq.EVENTS)  # wakes the caller that waits for the next message
                return parts


# --- both --------------------------------------------------------------------------------------


MOST_SMALL_FRAMES = 1024
"""Frames that a message may have in addition to one for every `BYTES_PER_FRAME` bytes."""

BYTES_PER_FRAME = 64


def _parts(socket: Any, receive: Callable[[], zmq.Frame]) -> list[zmq.Frame]:
    """All parts of the next message. One of too many small ones is taken, and not kept."""
    # Each part needs hundreds of bytes here, however few it took on the way.
    parts = [receive()]
    size = len(parts[0])
    while socket.getsockopt(zmq.RCVMORE):
        part = receive()
        parts.append(part)
        size += len(part)
        if len(parts) > MOST_SMALL_FRAMES + size // BYTES_PER_FRAME:
            found = len(parts)
            parts.clear()
            while socket.getsockopt(zmq.RCVMORE):
                receive()
                found += 1
            raise WireFormatError(
                "frame_count",
                "frames",
                f"expected at most {MOST_SMALL_FRAMES} frames, and one more for every "
                f"{BYTES_PER_FRAME} bytes, found {found} with {size} bytes in those that were read",
            )
    return parts


def _message(
    socket: Any, frames: Sequence[Any], envelope: Envelope, where: str
) -> tuple[list[Any], zmq.MessageTracker]:
    """All parts to send, and a tracker of when ZeroMQ has finished with them."""
    leading = [envelope] if isinstance(envelope, bytes) else list(envelope)
    for part in leading:
        if not isinstance(part, bytes):
            raise ArgumentTypeError(
                "bad_type",
                f"{where}(envelope)",
                f"expected bytes, or a list of them, found {type(part).__name__}",
            )
    if socket.type == zmq.ROUTER:
        if not leading:
            raise ArgumentError(
                "bad_option",
                f"{where}(envelope)",
                "a ROUTER socket requires the identity of the receiving peer, found an empty "
                "envelope; pass the envelope that recv_frames returned",
            )
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # Made here, because send_multipart returns a tracker of the last frame only. With copy=None,
    # pyzmq copies frames below its threshold: tracking such a frame costs more than copying it.
    parts = [zmq.Frame(memoryview(frame), track=True, copy=None) for frame in frames]
    return [*leading, *parts], zmq.MessageTracker(*parts)


def _opened(socket: Any, parts: list[zmq.Frame]) -> Received:
    """Split the parts where the message begins."""
    # A ROUTER's first frame is an identity. The peer may have chosen it, so it may look like the
    # beginning of a message.
    routed = int(socket.type == zmq.ROUTER)
    begin = next((i for i in range(routed, len(parts)) if _begins_message(parts[i].buffer)), None)
    if begin is None:  # a foreign message: decode will raise
        begin = routed
        if len(parts) > begin + 1 and not len(parts[begin]):
            begin += 1
    return Received([part.bytes for part in parts[:begin]], parts[begin:])


# A header is a msgpack map (one byte) whose first key is the magic; a blob is one buffer.
_FIRST_KEY = bytes([0xA0 | len(MAGIC)]) + MAGIC.encode()


def _begins_message(frame: memoryview) -> bool:
    return frame[1 : 1 + len(_FIRST_KEY)] == _FIRST_KEY or frame[: len(BLOB_MAGIC)] == BLOB_MAGIC


_SENDING = (
    "expected room for a message {}, found the high-water mark reached, or no peer connected; "
    "nothing was sent: try again, raise timeout, or check that the peer is receiving"
)
_RECEIVING = "expected a message {}, found none; raise timeout, or check that the peer is sending"


@contextmanager
def _reported(where: str, text: str, timeout: float | None) -> Iterator[None]:
    """Turn pyzmq's errors about the peer into ours; leave those about the socket alone."""
    try:
        yield
    except zmq.Again as error:
        limit = "within the socket's own time-out" if timeout is None else f"within {timeout:g} s"
        raise TransportTimeoutError("timed_out", f"{where}(socket)", text.format(limit)) from error
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        raise TransportError(
            "no_peer",
            f"{where}(envelope)",
            "expected the identity of a connected peer, found that no such peer is connected: it "
            "left, or has a different identity. Nothing was sent",
        ) from error


@contextmanager
def _waiting(socket: Any, option: int, timeout: float | None, where: str) -> Iterator[None]:
    """Set the time-out of a socket for one call."""
    if timeout is None:
        yield
        return
    _check_timeout(timeout, where)
    before = socket.getsockopt(option)
    socket.setsockopt(option, math.ceil(1000 * timeout))
    try:
        yield
    finally:
        if not socket.closed:
            socket.setsockopt(option, before)


def _check_timeout(timeout: Any, where: str) -> None:
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (number and 0 <= timeout <= _LONGEST):
        raise ArgumentError(
            "bad_option",
            f"{where}(timeout)",
            f"expected seconds from 0 to {_LONGEST}, or None, found {timeout!r:.80}",
        )


_LONGEST = (2**31 - 1) // 1000
"""libzmq counts milliseconds in an int."""


def _check(socket: Any, where: str, *, of_asyncio: bool) -> None:
    if isinstance(socket, zmq.asyncio.Socket) != of_asyncio:
        other = where.removeprefix("async_") if where.startswith("async_") else f"async_{where}"
        raise ArgumentTypeError(
            "bad_type",
            f"{where}(socket)",
            f"expected a socket of {'zmq.asyncio.Context' if of_asyncio else 'zmq.Context'}, found "
            f"{type(socket).__module__}.{type(socket).__qualname__}; use {other} for it",
        )
