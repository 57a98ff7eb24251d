"""Every answer has a deadline, and every failure says which address answered what."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from jobs.engines.talk import Address, ServerError, get, get_json, post, stream

Answer = Callable[[BaseHTTPRequestHandler, bytes], None]
SOON_S = 0.4  # a deadline that is to be missed
AMPLE_S = 20.0


@contextmanager
def server(answer: Answer, protocol: str = "HTTP/1.1") -> Iterator[Address]:
    """A real one, which answers every request so."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = protocol

        def do_GET(self) -> None:
            length = int(self.headers["Content-Length"] or 0)
            try:
                answer(self, self.rfile.read(length))
            except OSError:
                self.close_connection = True  # whoever asked has gone

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield Address(host="127.0.0.1", port=found.server_address[1])
    finally:
        found.shutdown()
        thread.join()
        found.server_close()


def says(text: str, status: int = 200) -> Answer:
    """An answer of a known length."""

    def answer(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(text.encode())))
        handler.end_headers()
        handler.wfile.write(text.encode())

    return answer


def streams(*parts: str, every_s: float = 0.0, chunked: bool = False, whole: bool = True) -> Answer:
    """Parts of a stream, one after the other; the connection ends behind them."""

    def answer(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        if chunked:
            handler.send_header("Transfer-Encoding", "chunked")
        else:
            handler.send_header("Connection", "close")
        handler.end_headers()
        for part in parts:
            data = part.encode()
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)
            handler.wfile.flush()
            time.sleep(every_s)
        if chunked and whole:
            handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = True

    return answer


def hangs(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    """Takes the request and says nothing, until whoever asked has gone."""
    handler.connection.recv(1)


@pytest.fixture
def nobody() -> Address:
    """An address at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Address(host="127.0.0.1", port=probe.getsockname()[1])


def test_json_and_text_come_as_they_were_said() -> None:
    with server(says('{"é": [1, 2]}')) as address:
        assert get_json(address, "/x") == {"é": [1, 2]}
        assert get(address, "/x") == '{"é": [1, 2]}'
        assert post(address, "/x", {}) == '{"é": [1, 2]}'


def test_a_request_arrives_at_its_path_as_json() -> None:
    def echo(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        kind = handler.headers["Content-Type"]
        says(f'{{"path": "{handler.path}", "kind": "{kind}", "body": {body.decode()}}}')(
            handler, body
        )

    with server(echo) as address:
        prefixed = Address(host=address.host, port=address.port, prefix="/engine")
        assert json.loads(post(prefixed, "/generate", {"ids": [3]}, AMPLE_S)) == {
            "path": "/engine/generate",
            "kind": "application/json",
            "body": {"ids": [3]},
        }


@pytest.mark.parametrize("ask", [get, get_json])
def test_an_answer_that_is_not_200_is_repeated_in_the_error(ask: Callable[..., object]) -> None:
    with (
        server(says("no\n  room", 500)) as address,
        pytest.raises(ServerError, match=re.escape(f"{address.url}/x answered 500: no room")),
    ):
        ask(address, "/x")
    with (
        server(says("", 503)) as address,
        pytest.raises(ServerError, match="answered 503: nothing"),
    ):
        ask(address, "/x")


def test_what_is_no_json_is_shown_in_part() -> None:
    with (
        server(says("<html>" + 1000 * "x")) as address,
        pytest.raises(ServerError, match=r"answered what is no JSON: '<html>x+'$") as caught,
    ):
        get_json(address, "/x")
    assert len(str(caught.value)) < 500


def test_an_answer_that_does_not_come_ends_with_the_deadline() -> None:
    with (
        server(hangs) as address,
        pytest.raises(ServerError, match=r"/x did not answer within 0\.4 s"),
    ):
        get(address, "/x", SOON_S)


@pytest.mark.parametrize("protocol", ["HTTP/1.0", "HTTP/1.1"])
def test_an_answer_that_trickles_ends_with_the_deadline_too(protocol: str) -> None:
    trickle = streams(*60 * ["x"], every_s=0.05)
    with (
        server(trickle, protocol) as address,
        pytest.raises(ServerError, match=r"/x did not answer within 0\.4 s"),
    ):
        get(address, "/x", SOON_S)


@pytest.mark.parametrize("chunked", [False, True])
def test_an_answer_that_comes_in_parts_is_put_together(chunked: bool) -> None:
    with server(streams("[1", ", ", "2]", every_s=0.02, chunked=chunked)) as address:
        assert get_json(address, "/x", AMPLE_S) == [1, 2]


def test_an_answer_that_is_cut_off_is_an_error() -> None:
    def cut(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        handler.wfile.write(b"half")
        handler.close_connection = True

    with server(cut) as address, pytest.raises(ServerError, match=r"/x: IncompleteRead"):
        get(address, "/x")


def test_where_nobody_listens_that_is_what_is_said(nobody: Address) -> None:
    words = re.escape(f"{nobody.url}/x: [Errno 111] Connection refused")
    with pytest.raises(ServerError, match=words):
        get(nobody, "/x")
    with pytest.raises(ServerError, match=words):
        list(stream(nobody, "/x", {}, AMPLE_S))


@pytest.mark.parametrize("chunked", [False, True])
def test_a_stream_gives_its_events_in_order_with_their_times(chunked: bool) -> None:
    parts = ('data: {"n": 1}\n\n', ': still here\n\ndata:{"n"', ": 2}\n\ndata: [DONE]\n\n")
    with server(streams(*parts, every_s=0.02, chunked=chunked)) as address:
        before = time.perf_counter()
        found = list(stream(address, "/x", {}, AMPLE_S))
    assert [event for _, event in found] == [{"n": 1}, {"n": 2}]
    times = [before, *(came for came, _ in found), time.perf_counter()]
    assert times == sorted(times)


def test_what_comes_behind_the_last_event_is_not_waited_for() -> None:
    parts = ('data: {"n": 1}\n\ndata: [DONE]\n\n', *200 * [": still here\n\n"])
    with server(streams(*parts, every_s=0.05)) as address:
        assert len(list(stream(address, "/x", {}, SOON_S))) == 1


@pytest.mark.parametrize("chunked", [False, True])
def test_a_stream_that_breaks_off_is_an_error_behind_its_events(chunked: bool) -> None:
    with server(streams('data: {"n": 1}\n\n', chunked=chunked, whole=False)) as address:
        found = stream(address, "/x", {}, AMPLE_S)
        assert next(found)[1] == {"n": 1}
        with pytest.raises(ServerError, match="/x: the stream ended before its last event"):
            next(found)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ('{"error": {"message": "out of memory"}}', "out of memory"),
        ("[1]", r"/x: \[1\]"),
        ("{", "is no JSON"),
    ],
)
def test_an_event_that_is_an_error_ends_the_stream(event: str, words: str) -> None:
    with (
        server(streams(f"data: {event}\n\n", 'data: {"n": 2}\n\n', "data: [DONE]\n\n")) as address,
        pytest.raises(ServerError, match=words),
    ):
        list(stream(address, "/x", {}, AMPLE_S))


def test_a_stream_that_is_refused_says_why() -> None:
    with (
        server(says('{"error": "too long"}', 400)) as address,
        pytest.raises(ServerError, match=r"/x answered 400: .*too long"),
    ):
        list(stream(address, "/x", {}, AMPLE_S))


@pytest.mark.parametrize("protocol", ["HTTP/1.0", "HTTP/1.1"])
@pytest.mark.parametrize("part", ['data: {"n": 1}\n\n', ": still here\n\n", "x"])
def test_a_stream_that_trickles_beyond_its_deadline_is_ended(part: str, protocol: str) -> None:
    with (
        server(streams(*60 * [part], every_s=0.05), protocol) as address,
        pytest.raises(ServerError, match=r"/x did not finish within 0\.4 s"),
    ):
        list(stream(address, "/x", {}, SOON_S))


@pytest.mark.parametrize("protocol", ["HTTP/1.0", "HTTP/1.1"])
def test_a_stream_that_falls_silent_is_ended_by_its_deadline(protocol: str) -> None:
    def silent(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        streams('data: {"n": 1}\n\n')(handler, body)
        handler.connection.recv(1)

    with (
        server(silent, protocol) as address,
        pytest.raises(ServerError, match=r"/x did not finish within 0\.4 s"),
    ):
        list(stream(address, "/x", {}, SOON_S))


@pytest.mark.parametrize(
    ("url", "means"),
    [
        ("http://gpu8:30000", "http://gpu8:30000"),
        ("gpu8:30000", "http://gpu8:30000"),
        ("http://gpu8:30000/v1", "http://gpu8:30000"),
        ("http://gpu8:30000/v1/", "http://gpu8:30000"),
        ("http://gpu8/engine/v1", "http://gpu8:80/engine"),
        ("https://gpu8", "https://gpu8:443"),
        ("https://gpu8:8443/", "https://gpu8:8443"),
        ("http://[::1]:30000", "http://[::1]:30000"),
    ],
)
def test_an_address_is_read_as_people_write_it(url: str, means: str) -> None:
    assert Address.parse(url).url == means
    assert Address.parse(means).url == means


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "ftp://gpu8:21",
        "unix:///run/x",
        "http://gpu8:port",
        "http://gpu8:99999",
        "http://[::1",
        "//",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ServerError, match=f"^{re.escape(url)} is no address of a server; write"):
        Address.parse(url)
