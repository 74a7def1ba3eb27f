"""Channels of pickled messages: to a child process, or over the network.

Reading never waits for the other end. Arrays in a message travel beside its pickle, without a copy.
Only processes of one run use channels: a child inherits its end, and another machine's process
shows a token. Left out: what is said.
"""

import contextlib
import hmac
import secrets
import select
import socket
import struct
import threading
from collections import deque
from typing import Any, NamedTuple

import cloudpickle

from headrace.errors import UsageError

_HEADER = struct.Struct("!QI")  # bytes after it; number of arrays
_SIZE = struct.Struct("!Q")  # of the pickle, then of each array
_ONE_PIECE = 1 << 16  # a message of at most so many bytes is sent in one piece
_ALIGNED = 16  # bytes, of arrays in what was received
_TOKEN_BYTES, _NUMBER = 32, struct.Struct("!I")
_INTRODUCED_WITHIN_S = 2.0
_CONNECTED_WITHIN_S = 20.0


def pickled(
    message: Any,
    receiver: str,
    remedy: str = "use one process (num_workers=0, num_learners=1)",
) -> bytes:
    """Pickle a message, with lambdas and classes of a script by value.

    Args:
        remedy: what the user can do otherwise, for the error.

    Raises:
        UsageError: it cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(message))
    except Exception as error:
        raise UsageError(
            f"The run cannot be sent to {receiver}: {type(error).__name__}: {error}.\n"
            "What makes the environment must not carry open files, locks or devices: open them "
            f"inside, or {remedy}."
        ) from error


class Channel:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._ready = select.poll()  # select takes no descriptor above 1023
        self._ready.register(end, select.POLLIN)
        self._header = memoryview(bytearray(_HEADER.size))
        self._count, self._into, self._received = 0, self._header, 0
        self._messages: deque[Any] = deque()  # that have come whole

    def fileno(self) -> int:
        """Return the descriptor, for `select` and its like."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Send a message; waits while the other end does not read more than the system buffers.

        Raises:
            OSError: the other end is gone.
        """
        for piece in _frame(message):
            self._socket.sendall(piece)

    def receive(self) -> Any:
        """Wait for a message. Raise EOFError if the other end is gone."""
        while not self._messages:
            self._read()
        return self._messages.popleft()

    def take(self) -> list[Any]:
        """Return the whole messages that are here. Raise EOFError once there will be no more."""
        while self._ready.poll(0):
            try:
                self._read()
            except EOFError:
                if not self._messages:
                    raise
                break
        messages, self._messages = list(self._messages), deque()
        return messages

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self) -> None:
        """Read on, into the header or what comes after it."""
        try:
            count = self._socket.recv_into(self._into[self._received :])
        except OSError:
            count = 0
        if not count:
            raise EOFError
        self._received += count
        if self._received < len(self._into):
            return
        if self._into is self._header:
            size, self._count = _HEADER.unpack(self._header)
            self._into = memoryview(bytearray(size))
        else:
            self._messages.append(_message(self._into, self._count))
            self._into = self._header
        self._received = 0


def _frame(message: Any) -> list[Any]:
    """Return the pieces that a message is sent as: one, or its arrays as they lie in memory."""
    arrays: list[Any] = []
    data = cloudpickle.dumps(message, protocol=5, buffer_callback=arrays.append)
    views = [array.raw() for array in arrays]
    sizes = struct.pack(f"!{1 + len(views)}Q", len(data), *(view.nbytes for view in views))
    pieces, size = [sizes, data], len(sizes) + len(data)
    for view in views:
        pieces += [bytes(-size % _ALIGNED), view]
        size += -size % _ALIGNED + view.nbytes
    pieces.insert(0, _HEADER.pack(size, len(views)))
    return [b"".join(pieces)] if size <= _ONE_PIECE else pieces


def _message(received: memoryview, num_arrays: int) -> Any:
    """Undo `_frame`: the arrays lie in what was received, and may be written to."""
    first, *sizes = struct.unpack_from(f"!{1 + num_arrays}Q", received)
    begin = _SIZE.size * (1 + num_arrays)
    end = begin + first
    data, arrays = received[begin:end], []
    for size in sizes:
        begin = end + -end % _ALIGNED
        end = begin + size
        arrays.append(received[begin:end])
    return cloudpickle.loads(data, buffers=arrays)


class NetworkChannel(Channel):
    """A channel between machines. Sending never waits: a thread sends what does not fit at once."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unsent: deque[Any] = deque()
        self._has_unsent = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_broken = False

    def send(self, message: Any) -> None:
        """Send a message. The caller must not change its arrays before the other end has them.

        Raises:
            OSError: the other end is gone.
        """
        pieces = deque(_frame(message))
        with self._has_unsent:
            if self._is_broken:
                raise BrokenPipeError("the other end is gone")
            while pieces and not self._unsent:
                sent = self._send_some(pieces[0])
                if sent < len(pieces[0]):
                    self._unsent.append(memoryview(pieces.popleft())[sent:])
                else:
                    pieces.popleft()
            self._unsent += pieces
            if self._unsent and self._thread is None:
                self._thread = threading.Thread(target=self._send_rest, daemon=True)
                self._thread.start()
            self._has_unsent.notify()

    @property
    def has_unsent(self) -> bool:
        """Return whether earlier messages are still on their way to the system."""
        return bool(self._unsent)

    def close(self) -> None:
        """Close this end. What has not been sent yet is dropped."""
        with self._has_unsent:
            self._is_broken = True
            self._has_unsent.notify()
        with contextlib.suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        super().close()

    def _send_some(self, piece: Any) -> int:
        try:
            return self._socket.send(piece, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _send_rest(self) -> None:
        while True:
            with self._has_unsent:
                self._has_unsent.wait_for(lambda: self._unsent or self._is_broken)
                if self._is_broken:
                    return
                piece = self._unsent[0]  # it stays there, so that nothing overtakes it
            try:
                self._socket.sendall(piece)
            except OSError:  # the reader gets EOFError for it
                self._is_broken = True
                return
            self._unsent.popleft()


class Door(NamedTuple):
    """Where a `Listener` is reached, and what it asks for."""

    address: tuple[str, int]
    token: bytes


class Listener:
    """Takes connections of this run's other processes, on one address of this machine."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=1024)
        token = secrets.token_bytes(_TOKEN_BYTES)
        self.door = Door((address, self._socket.getsockname()[1]), token)
        self._accepted: dict[int, NetworkChannel] = {}

    def accept(self, number: int) -> NetworkChannel:
        """Return the connection that `connect` has made with this number.

        Raises:
            OSError: nobody has made one.
        """
        self._socket.settimeout(_INTRODUCED_WITHIN_S)
        while number not in self._accepted:
            end, _ = self._socket.accept()
            if (found := self._introduced(end)) is None:
                end.close()  # a stranger
            else:
                self._accepted[found] = NetworkChannel(end)
        return self._accepted.pop(number)

    def close(self) -> None:
        """Take no more connections, and end those that nobody has accepted."""
        self._socket.close()
        for channel in self._accepted.values():
            channel.close()

    def _introduced(self, end: socket.socket) -> int | None:
        end.settimeout(_INTRODUCED_WITHIN_S)
        said = b""
        try:
            while len(said) < _TOKEN_BYTES + _NUMBER.size:
                if not (more := end.recv(_TOKEN_BYTES + _NUMBER.size - len(said))):
                    return None
                said += more
        except OSError:
            return None
        token, number = said[:_TOKEN_BYTES], said[_TOKEN_BYTES:]
        return (
            int(_NUMBER.unpack(number)[0]) if hmac.compare_digest(token, self.door.token) else None
        )


def connect(door: Door, number: int) -> NetworkChannel:
    """Connect to a `Listener`, which then accepts this number. OSError: it cannot be reached."""
    end = socket.create_connection(door.address, _CONNECTED_WITHIN_S)
    end.sendall(door.token + _NUMBER.pack(number))
    return NetworkChannel(end)
