"""The trainer of examples/http_post.py: what it answers to bodies that are not rows."""

import http.client
import threading
from http.server import HTTPServer

import pytest

from examples.http_post import BLOB, LIMIT, Trainer, blob, sample


@pytest.fixture
def ask():
    """Send a body with headers of your own; the status and the text of the reply."""

    def ask(body, kind=BLOB, cut=False, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), **headers}
        connection.request("POST", "/rows", body, headers)
        if cut:
            connection.sock.shutdown(1)  # nothing follows
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        return reply.status, text

    with HTTPServer(("127.0.0.1", 0), Trainer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield ask
        server.shutdown()


def test_a_trainer_answers_bad_bodies_and_goes_on(ask):
    good = bytes(blob(sample(5, True)))
    length = str(len(good) + 1)
    assert ask(b"", **{"Content-Length": str(LIMIT + 1)})[0] == 413
    assert ask(b"", **{"Content-Length": "-1"})[0] == 411
    assert ask(good, cut=True, **{"Content-Length": length})[0] == 400
    for bad in (good[:-1], good[:30], b"", b"foreign"):
        status, text = ask(bad)
        assert (status, "expected" in text) == (400, True), text
    assert ask(b"{", "application/json")[0] == 400
    assert ask(b"[]", "application/json")[0] == 400
    assert ask(good)[0] == 200
