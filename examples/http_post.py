"""A producer without torch posts rows to a trainer over HTTP: one blob per request, next to JSON.

Run it with ``python examples/http_post.py``. The producer is a process of its own, which imports
jagcodec, numpy and the standard library; orjson is measured, too, if it is installed.
"""

import base64
import importlib.util
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from statistics import median
from typing import Any

import numpy as np

from jagcodec import JagcodecError, Limits, encode_rows, to_blob

LIMIT = 256 << 20  # bytes of a body
TIMEOUT = 60  # seconds
LAYERS, TOP_K, EXPERTS = 48, 8, 128
REPEATS = 5
MOST_IN_LISTS = 2_000  # tokens: expert ids of 32,000 as lists of JSON take 10 seconds
BLOB = "application/octet-stream"

Row = dict[str, Any]


def sample(tokens: int, with_experts: bool) -> Row:
    """A row as a producer has it: lists of tokens, and an array of expert ids."""
    random = np.random.default_rng(tokens)
    row: Row = {
        "input_ids": random.integers(0, 152_000, tokens).tolist(),
        "logprobs": (-random.random(tokens, dtype=np.float32)).tolist(),
        "mask": (random.random(tokens) < 0.5).tolist(),
    }
    if with_experts:
        shape = tokens, LAYERS, TOP_K
        row["routed_experts"] = random.integers(0, EXPERTS, shape, dtype=np.uint8)
    return row


# --- the producer, which imports no torch ------------------------------------------------------


def blob(row: Row) -> bytearray:
    return to_blob(encode_rows([row], same_length=["input_ids", "logprobs", "mask"], narrow=True))


def as_lists(row: Row) -> Row:
    return {name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in row.items()}


def as_base64(row: Row) -> Row:
    """Expert ids as some engines send them."""
    ids = row["routed_experts"]
    data = base64.b64encode(ids).decode()
    envelope = {"data": data, "shape": list(ids.shape), "dtype": ids.dtype.name}
    return {**row, "routed_experts": envelope}


def post(port: int, kind: str, body: bytes | bytearray) -> Any:
    headers = {"Content-Type": kind}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/rows", body, headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:  # noqa: S310
        return json.loads(reply.read(1 << 16))


def measure(port: int, name: str, row: Row, write: Callable[[Row], bytes | bytearray]) -> None:
    """Post a row some times, and print the bytes and the median times without the comparison."""
    kind = BLOB if write is blob else f"application/json; by={name.partition(',')[0]}"
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        body = write(row)
        written = time.perf_counter()
        reply = post(port, kind, body)
        end = time.perf_counter()
        times.append(
            [1000 * (written - begin), reply["read"], 1000 * (end - begin) - reply["compare"]]
        )
    of_write, of_read, of_all = (median(column) for column in zip(*times, strict=True))
    experts = "with expert ids" if "routed_experts" in row else ""
    print(
        f"{len(row['mask']):6,} tokens {experts:15} {name:16} {len(body):11,} bytes "
        f"{of_write:8.2f} ms to write {of_read:8.2f} to read {of_all:8.2f} in all",
        flush=True,
    )


def writers(row: Row) -> dict[str, Callable[[Row], bytes | bytearray]]:
    """Each way to send a row, by its name."""
    dumpers: dict[str, Callable[[Row], bytes]] = {"json": lambda row: json.dumps(row).encode()}
    if importlib.util.find_spec("orjson") is not None:
        dumpers["orjson"] = importlib.import_module("orjson").dumps
    found: dict[str, Callable[[Row], bytes | bytearray]] = {"jagcodec": blob}
    for name, dumps in dumpers.items():
        if "routed_experts" not in row or len(row["mask"]) <= MOST_IN_LISTS:
            found[name] = partial(dumped, dumps, as_lists)
        if "routed_experts" in row:
            found[f"{name}, base64"] = partial(dumped, dumps, as_base64)
    return found


def dumped(dumps: Callable[[Row], bytes], prepare: Callable[[Row], Row], row: Row) -> bytes:
    return dumps(prepare(row))


def produce(port: int) -> None:
    for with_experts in (False, True):
        for tokens in (2_000, 32_000):
            row = sample(tokens, with_experts)
            for name, write in writers(row).items():
                measure(port, name, row, write)
    assert not {"torch", "tensordict"} & {*sys.modules}


# --- the trainer -------------------------------------------------------------------------------


def read_blob(body: bytes) -> Row:
    from jagcodec import materialize, open_wire

    return dict(materialize(open_wire(body, limits=Limits(bytes=LIMIT))))


def read_json(body: bytes, kind: str) -> Row:
    import torch

    from jagcodec.integrations.json_arrays import array_of_envelope

    row = (importlib.import_module("orjson") if kind.endswith("orjson") else json).loads(body)
    experts = row.get("routed_experts")
    kinds = {"input_ids": "int64", "logprobs": "float32", "mask": "bool"}
    arrays = {name: np.array(row[name], kind) for name, kind in kinds.items()}
    if isinstance(experts, dict):
        experts = array_of_envelope(experts, max_bytes=LIMIT)
    if experts is not None:
        arrays["routed_experts"] = np.array(experts, np.uint8)
    return {name: torch.from_numpy(array)[None] for name, array in arrays.items()}


class Trainer(BaseHTTPRequestHandler):
    """Reads a row of a body that is not too large, and compares it with what was sent."""

    timeout = TIMEOUT  # of each read: a producer that stops does not stop the trainer

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 20):
            self.send_error(411)
        elif int(length) > LIMIT:  # before anything is read
            self.send_error(413)
        else:
            body = self.rfile.read(int(length))
            if len(body) == int(length):
                self.receive(body)
            else:
                self.send_error(400, explain="The body was cut")

    def receive(self, body: bytes) -> None:
        kind = self.headers.get("Content-Type", "")
        begin = time.perf_counter()
        try:
            batch = read_blob(body) if kind == BLOB else read_json(body, kind)
        except (JagcodecError, ValueError, LookupError, TypeError, AttributeError) as error:
            self.send_error(400, explain=f"{error!s:.200}")
            return
        read = time.perf_counter()
        self.compare(batch)
        compared = time.perf_counter()
        self.reply({"read": 1000 * (read - begin), "compare": 1000 * (compared - read)})

    def compare(self, batch: Row) -> None:
        sent = sample(batch["mask"].shape[1], "routed_experts" in batch)
        assert batch.keys() == sent.keys()
        for name, column in batch.items():
            assert np.array_equal(column[0].numpy(), np.asarray(sent[name], column.numpy().dtype))

    def reply(self, times: dict[str, float]) -> None:
        text = json.dumps(times).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    read_blob(bytes(blob(sample(2, False))))  # imports torch before anything is measured
    with HTTPServer(("127.0.0.1", 0), Trainer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        subprocess.run([sys.executable, __file__, str(server.server_port)], check=True)  # noqa: S603
        server.shutdown()
    print("every row arrived as it was sent; the producer imported no torch")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        produce(int(sys.argv[1]))
    else:
        main()
