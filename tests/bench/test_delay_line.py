"""The line that benchmarks and tests put between a client and a host."""

import socket
import socketserver
import threading
import time

import pytest

from bench.delay_line import DelayLine


class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        try:
            while data := self.request.recv(1 << 16):
                self.request.sendall(data)
        except OSError:
            pass


@pytest.fixture
def echo():
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def connect(line):
    return socket.create_connection(("127.0.0.1", line.port), timeout=10)


def connect_and_read(line):
    with connect(line) as sock:
        sock.recv(1)


def read(sock, size):
    data = b""
    while len(data) < size:
        part = sock.recv(1 << 16)
        assert part
        data += part
    return data


def test_each_round_trip_takes_its_time_and_bulk_takes_one(echo):
    with DelayLine(echo, 0.1) as line, connect(line) as sock:
        started = time.monotonic()
        for _ in range(3):
            sock.sendall(b"ping")
            assert read(sock, 4) == b"ping"
        assert time.monotonic() - started >= 0.3
        data = bytes(range(256)) * 16384
        threading.Thread(target=sock.sendall, args=(data,)).start()
        assert read(sock, len(data)) == data  # in order
        assert line.sent == line.received == len(data) + 12


def test_frozen_and_thawed(echo):
    with DelayLine(echo) as line, connect(line) as sock:
        sock.sendall(b"one")
        assert read(sock, 3) == b"one"
        line.freeze()
        sock.sendall(b"two")
        sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        line.thaw()
        sock.settimeout(10)
        assert read(sock, 3) == b"two"


def test_cut(echo):
    with DelayLine(echo) as line, connect(line) as sock:
        sock.sendall(b"one")
        assert read(sock, 3) == b"one"
        line.cut()
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
        with connect(line) as again:
            again.sendall(b"two")
            assert read(again, 3) == b"two"
        assert line.connections == 2


def test_refused(echo):
    with DelayLine(echo) as line, connect(line) as old:
        old.sendall(b"one")
        assert read(old, 3) == b"one"
        line.refuse()
        with pytest.raises(ConnectionResetError):
            connect_and_read(line)
        old.sendall(b"two")
        assert read(old, 3) == b"two"


def test_the_end_is_passed_on(echo):
    with DelayLine(echo, 0.02) as line, connect(line) as sock:
        sock.sendall(b"last")
        sock.shutdown(socket.SHUT_WR)
        assert read(sock, 4) == b"last"
        assert sock.recv(1) == b""


def test_nothing_behind_it():
    with DelayLine(1) as line, pytest.raises(ConnectionResetError):
        connect_and_read(line)
