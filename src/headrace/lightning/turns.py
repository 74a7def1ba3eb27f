"""A function in a thread of its own, which takes turns with the caller.

An algorithm's update asks for each gradient step in the middle of a loop, and the Trainer asks for
each minibatch in the middle of another. Both loops stay whole: one of them runs here. Never do both
run at a time, so that nothing depends on timing. Left out: what is handed over (`training.py`).
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class Turns:
    """Runs a function, which hands things over and waits for the answer to each.

    Args:
        function: calls `hand_over`.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._things: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._closed = threading.Event()
        # Daemon: an interpreter that ends without `close` does not wait for it.
        self._thread = threading.Thread(target=self._run, name="headrace", daemon=True)

    def go_on(self, answer: Any = None) -> Any:
        """Answer what was handed over last, and wait for the next thing; None: there is no more.

        The first call starts the function. It raises what the function raises.
        """
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._answers.put(answer)
        thing, error = self._things.get()
        if error is not None:
            raise error
        return thing

    def hand_over(self, thing: Any) -> Any:
        """Give something to the caller of `go_on`, from the function; return the answer."""
        self._things.put((thing, None))
        answer = self._answers.get()
        if self._closed.is_set():
            raise _Closed
        return answer

    def is_closed(self) -> bool:
        """Return whether the function is to end."""
        return self._closed.is_set()

    def close(self) -> None:
        """End the function where it waits for an answer, or by its own asking; wait for that."""
        self._closed.set()
        if self._thread.ident is not None:
            self._answers.put(None)
            self._thread.join()

    def _run(self) -> None:
        try:
            self._function()
        except _Closed:
            pass
        except BaseException as error:
            self._things.put((None, error))
        else:
            self._things.put((None, None))


class _Closed(BaseException):
    """Nobody answers any more. No error: the function's `with` and `finally` clean up."""
