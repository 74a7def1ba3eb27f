"""Messages between the learner and a sampler, which never make the learner wait for the sampler.

What goes through are Python's own pickles, between processes of one run only: the sampler's end is
inherited. Left out: what is said (`synchronous.py`, `worker_main.py`).
"""

import select
import socket
import struct
from typing import Any

import cloudpickle

_HEADER = struct.Struct("!Q")
_PIECE = 1 << 20


class Channel:
    """One end.

    Args:
        end: of a socket pair.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()

    def fileno(self) -> int:
        """For `select` and its like."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Send a message; waits while the other end does not read more than the system buffers.

        Raises:
            OSError: the other end is gone.
        """
        data = cloudpickle.dumps(message)
        self._socket.sendall(_HEADER.pack(len(data)) + data)

    def receive(self) -> Any:
        """Wait for a message; EOFError if the other end is gone."""
        while not (messages := self._complete(1)):
            self._read()
        return messages[0]

    def take(self) -> list[Any]:
        """The messages that are here, whole ones; EOFError once there will be no more."""
        while not (messages := self._complete(None)):
            if not select.select([self._socket], [], [], 0)[0]:
                return []
            self._read()
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

    def _complete(self, most: int | None) -> list[Any]:
        """Take the messages that have come whole, `most` of them at most."""
        messages: list[Any] = []
        while len(self._received) >= _HEADER.size and len(messages) != most:
            (size,) = _HEADER.unpack_from(self._received)
            end = _HEADER.size + size
            if len(self._received) < end:
                break
            messages.append(cloudpickle.loads(bytes(self._received[_HEADER.size : end])))
            del self._received[:end]
        return messages
