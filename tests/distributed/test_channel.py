"""Channels: messages and their arrays arrive as they were sent, and only from who has the token."""

import contextlib
import socket
import struct
import threading

import numpy as np
import pytest

from headrace.distributed.channel import Channel, Listener, connect

HOST = "127.0.0.1"


@pytest.fixture
def listener():
    taking = Listener(HOST)
    yield taking
    taking.close()


@pytest.fixture
def pair(listener):
    """The two ends of a connection over the network."""
    there = connect(listener.door, 7)
    here = listener.accept(7)
    yield here, there
    here.close()
    there.close()


def receive(channel, count):
    return [channel.receive() for _ in range(count)]


def test_arrays_arrive_equal_and_may_be_written_to():
    here, there = map(Channel, socket.socketpair())
    arrays = [np.arange(size, dtype=np.float32) for size in (0, 3, 20_000, 1_000_000)]
    backwards = arrays[2][::-2]  # its bytes do not lie in one piece
    sent = [("one", arrays), {"two": backwards}, None]
    sending = threading.Thread(target=lambda: [here.send(message) for message in sent])
    sending.start()
    (name, found), two, nothing = receive(there, 3)
    sending.join()
    assert (name, nothing) == ("one", None)
    for array, same in zip([*arrays, backwards], [*found, two["two"]], strict=True):
        assert same.dtype == np.float32 and np.array_equal(array, same)
        same += 1
    here.close()
    with pytest.raises(EOFError):
        there.take()
    there.close()


def test_all_that_has_come_is_taken_before_the_end_is_told():
    """Of a worker that ends, the last messages say why."""
    here, there = map(Channel, socket.socketpair())
    for message in ("done", np.ones(1000), "failed"):
        here.send(message)
    here.close()
    done, array, failed = there.take()
    assert (done, array.sum(), failed) == ("done", 1000, "failed")
    with pytest.raises(EOFError):
        there.take()
    there.close()


def test_sending_over_the_network_never_waits_and_keeps_the_order(pair):
    here, there = pair
    sizes = [1, 30_000_000, 10, 5_000_000, 100_000, 2]  # more than the system buffers
    for number, size in enumerate(sizes):
        here.send((number, np.full(size, number, np.uint8)))  # nobody reads yet
    for number, size in enumerate(sizes):
        found, array = there.receive()
        assert found == number
        assert array.shape == (size,) and (array == number).all()
    there.send("back")
    assert here.receive() == "back"
    assert here.take() == []


def test_messages_do_not_overtake_each_other(pair):
    here, there = pair
    numbers = range(400)
    found = []
    reading = threading.Thread(target=lambda: found.extend(receive(there, len(numbers))))
    reading.start()
    for number in numbers:
        here.send((number, np.empty(1 if number % 3 else 1_000_000, np.uint8)))
    reading.join()
    assert [number for number, _ in found] == list(numbers)


def test_the_end_of_the_other_side_is_found_by_reading_and_sending(pair):
    here, there = pair
    there.close()
    with pytest.raises(EOFError):
        here.receive()
    with pytest.raises(OSError, match=r"pipe|gone|reset"):
        for _ in range(1000):  # the first ones may still be taken by the system
            here.send(np.zeros(1 << 17, np.uint8))


def test_what_is_not_sent_when_the_other_side_ends_breaks_the_channel(pair):
    here, there = pair
    here.send(np.zeros(30_000_000, np.uint8))
    there.close()
    here._thread.join()
    with pytest.raises(BrokenPipeError):
        here.send("more")


def test_strangers_are_refused(listener):
    address, token = listener.door
    strangers = [socket.create_connection(address) for _ in range(3)]
    strangers[0].sendall(bytes(len(token)) + struct.pack("!I", 1))  # a wrong token
    strangers[1].shutdown(socket.SHUT_WR)  # who says nothing, and then waits
    ours = {number: connect(listener.door, number) for number in (2, 1)}
    for number in (1, 2):
        with contextlib.closing(listener.accept(number)) as here:
            here.send(number)
            assert ours[number].receive() == number
    for stranger in strangers[:2]:
        assert stranger.recv(1) == b""
    for each in (*strangers, *ours.values()):
        each.close()


def test_nobody_comes(listener, monkeypatch):
    monkeypatch.setattr("headrace.distributed.channel._INTRODUCED_WITHIN_S", 0.1)
    with pytest.raises(TimeoutError):
        listener.accept(1)
    with contextlib.closing(connect(listener.door, 1)), contextlib.closing(listener.accept(1)):
        pass
