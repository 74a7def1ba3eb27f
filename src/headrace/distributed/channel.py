"""A channel of pickled messages between a process and its child; reading never waits for the child.

Only processes of one run use it: the child inherits its end.
"""

import select
import socket
import struct
from collections import deque
from typing import Any

import cloudpickle

from headrace.errors import UsageError

_HEADER = struct.Struct("!Q")
_PIECE = 1 << 20


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
    """One end of a socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._ready = select.poll()  # select takes no descriptor above 1023
        self._ready.register(end, select.POLLIN)
        self._received = bytearray()
        self._messages: deque[Any] = deque()  # that have come whole

    def fileno(self) -> int:
        """Return the descriptor, for `select` and its like."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Send a message; waits while the other end does not read more than the system buffers.

        Raises:
            OSError: the other end is gone.
        """
        data = cloudpickle.dumps(message)
        self._socket.sendall(_HEADER.pack(len(data)) + data)

    def receive(self) -> Any:
        """Wait for a message. Raise EOFError if the other end is gone."""
        while not self._messages:
            self._read()
        return self._messages.popleft()

    def take(self) -> list[Any]:
        """Return the whole messages that are here. Raise EOFError once there will be no more."""
        while not self._messages and self._ready.poll(0):
            self._read()
        messages, self._messages = list(self._messages), deque()
        return messages

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self) -> None:
        try:
            piece = self._socket.recv(_PIECE)
        except ConnectionError:
            piece = b""
        if not piece:
            raise EOFError
        self._received += piece
        while len(self._received) >= _HEADER.size:
            end = _HEADER.size + _HEADER.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            self._messages.append(cloudpickle.loads(bytes(self._received[_HEADER.size : end])))
            del self._received[:end]
