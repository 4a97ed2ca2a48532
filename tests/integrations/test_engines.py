"""What vLLM and SGLang return, as rows: stand-ins with the names and types of their fields."""

import base64
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from jagcodec import ArgumentError, decode, encode_rows, open_wire
from jagcodec.integrations import sglang, vllm


def refused(rows_of, value):
    """The path and the detail of an error."""
    with pytest.raises(ArgumentError) as raised:
        rows_of(value)
    return raised.value.path, raised.value.detail


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_no_engine_is_imported_and_no_torch(engine):
    code = (
        f"import sys; from jagcodec.integrations.{engine} import rows_of; rows_of([]);"
        f"print([name for name in ('torch', 'tensordict', {engine!r}) if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["[]"], run.stderr


# --- vLLM ----------------------------------------------------------------------------------------


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: Any
    routed_experts: np.ndarray | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestOutput:
    def __init__(self, prompt_token_ids, outputs, prompt_logprobs=None):
        self.request_id = "7"
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = True


class FlatLogprobs(Sequence):
    """Not a list, and no None in it: a position without logprobs is an empty dict."""

    def __init__(self, positions):
        self.positions = [position or {} for position in positions]

    def __len__(self):
        return len(self.positions)

    def __getitem__(self, index):
        return self.positions[index]


def sample(tokens, values, *, index=0, finish="stop", experts=None):
    """The sampled token is the second most likely one, but listed first, as vLLM does."""
    logprobs = None
    if values is not None:
        logprobs = [
            {token: Logprob(value, 2), 999: Logprob(-0.001, 1)}
            for token, value in zip(tokens, values, strict=True)
        ]
    return CompletionOutput(index, "text", tokens, None, logprobs, experts, finish)


class TestVllm:
    def test_logprobs_are_those_of_the_sampled_tokens(self):
        outputs = [RequestOutput([1, 2, 3], [sample([7, 8], [-0.5, -2.0])])]
        assert vllm.rows_of(outputs) == [
            {
                "prompt_ids": [1, 2, 3],
                "response_ids": [7, 8],
                "logprobs": [-0.5, -2.0],
                "finish_reason": "stop",
            }
        ]

    def test_wherever_in_the_dict_they_are(self):
        position = {9: Logprob(-0.1, 1), 8: Logprob(-0.2, 2), 7: Logprob(-4.0, 50)}
        output = CompletionOutput(0, "", (7,), None, [position], finish_reason="length")
        assert vllm.rows_of([RequestOutput([1], [output])])[0]["logprobs"] == [-4.0]

    @pytest.mark.parametrize("container", [list, FlatLogprobs])
    def test_prompt_logprobs_are_those_of_its_own_tokens_and_the_first_is_zero(self, container):
        prompt = container([None, {2: Logprob(-1.5, 9), 5: Logprob(-0.5, 1)}, {3: Logprob(-2.5)}])
        outputs = [RequestOutput([1, 2, 3], [sample([7], [-0.5])], prompt)]
        outputs[0].outputs[0].logprobs = container(outputs[0].outputs[0].logprobs)
        (row,) = vllm.rows_of(outputs)
        assert row["prompt_logprobs"] == [0.0, -1.5, -2.5]
        assert row["logprobs"] == [-0.5]

    def test_n_samples_are_n_rows_in_order_with_the_prompt_of_each(self):
        experts = [np.full((4, 2, 2), value, dtype=np.uint8) for value in range(3)]
        prompt = [None, {2: Logprob(-1.5)}]
        outputs = [
            RequestOutput(
                [1, 2],
                [
                    sample([7, 8], [-0.5, -1.0], index=0, experts=experts[0]),
                    sample([9], [-2.0], index=1, finish="length", experts=experts[1]),
                ],
                prompt,
            ),
            RequestOutput([4], [sample([5], [-3.0], experts=experts[2])], [None]),
        ]
        rows = vllm.rows_of(outputs)
        assert [row["response_ids"] for row in rows] == [[7, 8], [9], [5]]
        assert [row["prompt_ids"] for row in rows] == [[1, 2], [1, 2], [4]]
        assert [row["prompt_logprobs"] for row in rows] == [[0.0, -1.5], [0.0, -1.5], [0.0]]
        assert [row["finish_reason"] for row in rows] == ["stop", "length", "stop"]
        assert all(row["routed_experts"] is array for row, array in zip(rows, experts, strict=True))
        rows[0]["prompt_ids"].append(0)
        rows[0]["prompt_logprobs"].append(0.0)
        assert (rows[1]["prompt_ids"], rows[1]["prompt_logprobs"]) == ([1, 2], [0.0, -1.5])
        assert outputs[0].prompt_token_ids == [1, 2]

    def test_numbers_are_those_of_python(self):
        tokens = np.array([7, 8])
        output = sample(tokens, [np.float32(-0.5), -1])
        (row,) = vllm.rows_of([RequestOutput(np.array([1, 2]), [output])])
        numbers = row["prompt_ids"] + row["response_ids"] + row["logprobs"]
        assert [type(number) for number in numbers] == [int] * 4 + [float] * 2

    def test_what_was_asked_for_of_no_sample_is_in_no_row(self):
        rows = vllm.rows_of([RequestOutput(None, [sample([7], None), sample([], None)])])
        assert [list(row) for row in rows] == [["response_ids", "finish_reason"]] * 2

    def test_an_empty_response_has_empty_logprobs(self):
        outputs = [RequestOutput([1], [sample([], [], finish="abort"), sample([7], [-0.5])])]
        rows = vllm.rows_of(outputs)
        assert (rows[0]["response_ids"], rows[0]["logprobs"]) == ([], [])

    @pytest.mark.parametrize(
        ("key", "change"),
        [
            ("logprobs", {"logprobs": None}),
            ("routed_experts", {"routed_experts": None}),
            ("finish_reason", {"finish_reason": None}),
        ],
    )
    @pytest.mark.parametrize("bad", [0, 1, 2])
    def test_the_first_sample_without_what_others_have_is_named(self, key, change, bad):
        experts = np.zeros((2, 2, 2), dtype=np.uint8)
        samples = [sample([7], [-0.5], experts=experts) for _ in range(3)]
        for name, value in change.items():
            setattr(samples[bad], name, value)
            if bad == 1:
                setattr(samples[2], name, value)
        outputs = [RequestOutput([1], samples[:1]), RequestOutput([1], samples[1:])]
        path, detail = refused(vllm.rows_of, outputs)
        assert path == f"vllm.rows_of(outputs)[{bad > 0:d}].outputs[{bad == 2:d}]"
        assert detail.startswith(f"expected {key} in all samples or in none")

    def test_a_request_without_prompt_logprobs_among_others_is_named(self):
        with_them = RequestOutput([1], [sample([7], [-0.5])], [None])
        path, detail = refused(vllm.rows_of, [with_them, RequestOutput([1], [sample([7], [-0.5])])])
        assert path == "vllm.rows_of(outputs)[1].outputs[0]"
        assert "prompt_logprobs" in detail

    @pytest.mark.parametrize(
        ("tokens", "positions", "where", "found"),
        [
            ([7, 8], [{7: Logprob(-0.5)}], ".logprobs", "expected 2 items like token ids, found 1"),
            ([], [{7: Logprob(-0.5)}], ".logprobs", "expected 0 items like token ids, found 1"),
            ([7], [{8: Logprob(-0.5)}], ".logprobs[0]", "logprob of token 7, found those of [8]"),
            ([7], [None], ".logprobs[0]", "logprob of token 7, found those of []"),
            ([7], [{}], ".logprobs[0]", "logprob of token 7, found those of []"),
            ([7], [{7: Logprob(None)}], ".logprobs[0]", "expected a logprob, found None"),  # type: ignore[arg-type]
            ([7], [{7: Logprob("-1")}], ".logprobs[0]", "expected a logprob, found '-1'"),  # type: ignore[arg-type]
            ([7], [{7: -0.5}], "", "a CompletionOutput of vLLM, found AttributeError"),
            ([7.0], [{7: Logprob(-0.5)}], "", "a CompletionOutput of vLLM, found TypeError"),
        ],
    )
    def test_logprobs_that_are_not_of_the_tokens(self, tokens, positions, where, found):
        good = sample([7], [-0.5])
        bad = CompletionOutput(1, "", tokens, None, positions, finish_reason="stop")
        path, detail = refused(vllm.rows_of, [RequestOutput([1], [good, bad])])
        assert path == f"vllm.rows_of(outputs)[0].outputs[1]{where}"
        assert found in detail

    @pytest.mark.parametrize(
        ("positions", "where"),
        [
            ([None, None], "[1]"),
            ([None], ""),
            ([{9: Logprob(-0.5)}, {2: Logprob(-0.5)}], "[0]"),
        ],
    )
    def test_prompt_logprobs_that_are_not_of_the_prompt(self, positions, where):
        outputs = [RequestOutput([1, 2], [sample([7], [-0.5])], positions)]
        path, _ = refused(vllm.rows_of, outputs)
        assert path == f"vllm.rows_of(outputs)[0].prompt_logprobs{where}"

    @pytest.mark.parametrize(
        ("outputs", "path"),
        [
            (3, "vllm.rows_of(outputs)"),
            (RequestOutput([1], []), "vllm.rows_of(outputs)"),
            ([RequestOutput([1], []), {"outputs": []}], "vllm.rows_of(outputs)[1]"),
            ([RequestOutput(["a"], [])], "vllm.rows_of(outputs)[0]"),
            (
                [RequestOutput([1], [sample([7], None), None])],
                "vllm.rows_of(outputs)[0].outputs[1]",
            ),
        ],
    )
    def test_anything_else(self, outputs, path):
        assert refused(vllm.rows_of, outputs)[0] == path

    def test_rows_can_be_encoded(self):
        experts = [np.arange(n * 4, dtype=np.int16).reshape(n, 2, 2) for n in (4, 1)]
        samples = [
            sample([7, 8], [-0.5, -1.0], experts=experts[0]),
            sample([], [], finish="abort", experts=experts[1]),
        ]
        rows = vllm.rows_of([RequestOutput([1, 2, 3], samples, [None, *_of([2, 3], [-1.5, -2.5])])])
        frames = encode_rows(rows, same_length=["response_ids", "logprobs"])
        found = decode(frames)
        assert [row.tolist() for row in found["response_ids"].unbind()] == [[7, 8], []]
        assert [row.tolist() for row in found["logprobs"].unbind()] == [[-0.5, -1.0], []]
        assert [row.tolist() for row in found["prompt_logprobs"].unbind()] == [
            [0.0, -1.5, -2.5]
        ] * 2
        assert list(found["finish_reason"]) == ["stop", "abort"]
        assert [row.tolist() for row in found["routed_experts"].unbind()] == [
            array.tolist() for array in experts
        ]
        assert found["response_ids"].dtype == torch.int64
        assert found["routed_experts"].dtype == torch.int16


def _of(tokens, values):
    return [{token: Logprob(value)} for token, value in zip(tokens, values, strict=True)]


# --- SGLang --------------------------------------------------------------------------------------


def response(tokens, values, *, prompt=(1, 2, 3), finish="stop", prompt_values=(), **more):
    """What /generate returns, with or without ``return_logprob``."""
    ended: dict[str, Any] = {"type": finish, "matched": 8}
    meta: dict[str, Any] = {"id": "d1", "finish_reason": ended, "prompt_tokens": len(prompt)}
    if values is not None:
        meta["input_token_logprobs"] = [
            (value, token, None)
            for value, token in zip(
                prompt_values, prompt[len(prompt) - len(prompt_values) :], strict=True
            )
        ]
        meta["output_token_logprobs"] = [
            (value, token, None) for value, token in zip(values, tokens, strict=True)
        ]
    meta |= more.pop("meta", {})
    return {"text": "text", "output_ids": list(tokens), "meta_info": meta, **more}


def as_json(value):
    return json.loads(json.dumps(value))


class TestSglang:
    @pytest.mark.parametrize("seen", [lambda value: value, as_json], ids=["engine", "endpoint"])
    def test_logprobs_are_those_of_the_sampled_tokens(self, seen):
        responses = [response([7, 8], [-0.5, -2.0], prompt_token_ids=[1, 2, 3])]
        assert sglang.rows_of(seen(responses)) == [
            {
                "prompt_ids": [1, 2, 3],
                "response_ids": [7, 8],
                "logprobs": [-0.5, -2.0],
                "finish_reason": "stop",
            }
        ]

    def test_prompt_logprobs_and_ids_of_triples_and_the_first_is_zero(self):
        (row,) = sglang.rows_of([response([7], [-0.5], prompt_values=[None, -1.5, -2.5])])
        assert row["prompt_ids"] == [1, 2, 3]
        assert row["prompt_logprobs"] == [0.0, -1.5, -2.5]

    def test_a_first_prompt_logprob_is_kept(self):
        (row,) = sglang.rows_of([response([7], [-0.5], prompt_values=[-0.75, -1.5, -2.5])])
        assert row["prompt_logprobs"] == [-0.75, -1.5, -2.5]

    def test_returned_ids_are_preferred(self):
        """Triples have 0 where the prompt has an image."""
        responses = [
            response([7], [-0.5], prompt_values=[None, -1.5, -2.5], prompt_token_ids=[1, 90_000, 3])
        ]
        (row,) = sglang.rows_of(responses)
        assert row["prompt_ids"] == [1, 90_000, 3]
        assert row["prompt_logprobs"] == [0.0, -1.5, -2.5]

    def test_a_last_prompt_token_without_a_logprob_is_nothing(self):
        rows = sglang.rows_of([response([7], [-0.5], prompt_values=[None])] * 2)
        assert [list(row) for row in rows] == [["response_ids", "logprobs", "finish_reason"]] * 2

    def test_a_part_of_the_prompt_is_refused(self):
        good = response([7], [-0.5], prompt_values=[None, -1.5, -2.5])
        bad = response([7], [-0.5], prompt_values=[None, -2.5])
        path, detail = refused(sglang.rows_of, [good, bad])
        assert path == "sglang.rows_of(responses)[1].input_token_logprobs"
        assert "all 3 tokens of the prompt, found 2; pass logprob_start_len=0" in detail

    def test_one_response_and_batches_of_batches(self):
        one, two, three = (response([token], [-0.5]) for token in (7, 8, 9))
        assert [row["response_ids"] for row in sglang.rows_of(one)] == [[7]]
        rows = sglang.rows_of([[one, two], (three,), []])
        assert [row["response_ids"] for row in rows] == [[7], [8], [9]]
        path, _ = refused(sglang.rows_of, [[one, two], [three, response([7], None)]])
        assert path == "sglang.rows_of(responses)[1][1]"

    def test_without_logprobs(self):
        rows = sglang.rows_of([response([7], None), response([], None, finish="abort")])
        assert rows == [
            {"response_ids": [7], "finish_reason": "stop"},
            {"response_ids": [], "finish_reason": "abort"},
        ]

    def test_an_empty_response_has_empty_logprobs(self):
        rows = sglang.rows_of([response([7], [-0.5]), response([], [])])
        assert [row["logprobs"] for row in rows] == [[-0.5], []]

    @pytest.mark.parametrize("dtype", [None, "int32", "uint8", "uint16"])
    def test_routed_experts_are_decoded(self, dtype):
        sent = np.arange(24, dtype=dtype or "int32").reshape(4, 3, 2)
        meta = {"routed_experts": base64.b64encode(sent.tobytes()).decode()}
        if dtype is not None:
            meta["routed_experts_dtype"] = dtype
        (row,) = sglang.rows_of([response([7, 8], [-0.5, -1.0], meta=meta)])
        assert row["routed_experts"].dtype == sent.dtype
        assert row["routed_experts"].reshape(-1, 3, 2).tolist() == sent.tolist()

    @pytest.mark.parametrize("bad", [0, 1, 2])
    def test_the_first_sample_without_what_others_have_is_named(self, bad):
        responses = [response([7], [-0.5]) for _ in range(3)]
        del responses[bad]["meta_info"]["output_token_logprobs"]
        path, detail = refused(sglang.rows_of, responses)
        assert path == f"sglang.rows_of(responses)[{bad}]"
        assert detail.startswith("expected logprobs in all samples or in none")

    def test_a_request_that_was_aborted_while_it_waited_has_no_prompt(self):
        waited = response([], [], finish="abort")
        del waited["meta_info"]["prompt_tokens"]
        assert len(sglang.rows_of([waited, waited])) == 2
        good = response([7], [-0.5], prompt_values=[None, -1.5, -2.5])
        assert refused(sglang.rows_of, [good, waited])[0] == "sglang.rows_of(responses)[1]"

    @pytest.mark.parametrize(
        ("triples", "where", "found"),
        [
            ([(-0.5, 7, None)], "", "expected 2 items like output_ids, found 1"),
            (
                [(-0.5, 7, None), (-0.5, 9, None)],
                "[1]",
                "expected token 8 like output_ids, found 9",
            ),
            ([(-0.5, 7, None), (None, 8, None)], "[1]", "expected a logprob, found None"),
        ],
    )
    def test_logprobs_that_are_not_of_the_tokens(self, triples, where, found):
        bad = response([7, 8], [0, 0], meta={"output_token_logprobs": triples})
        path, detail = refused(sglang.rows_of, [response([7], [-0.5]), bad])
        assert path == f"sglang.rows_of(responses)[1].output_token_logprobs{where}"
        assert found in detail

    @pytest.mark.parametrize(
        "bad",
        [
            "text",
            None,
            {"text": "no meta_info", "output_ids": []},
            {"meta_info": {}, "output_ids": []},
            {"meta_info": {"finish_reason": None}},
            response(["a"], None),
            response([7], None, meta={"finish_reason": "stop"}),
            response([7], None, meta={"output_token_logprobs": [(-0.5, 7)]}),
            response([7], None, meta={"routed_experts": "AAAA!AAAAAAAAAAAA"}),
            response([7], None, meta={"routed_experts": "AAAA", "routed_experts_dtype": "int"}),
        ],
        ids=repr,
    )
    def test_anything_else_is_named(self, bad):
        path, detail = refused(sglang.rows_of, [response([7], None), bad])
        assert path == "sglang.rows_of(responses)[1]"
        assert detail.startswith("expected a response of SGLang's /generate, found ")

    def test_rows_can_be_encoded(self):
        experts = np.arange(16, dtype=np.int32)
        meta = {"routed_experts": base64.b64encode(experts.tobytes()).decode()}
        responses = [
            response([7, 8], [-0.5, -1.0], prompt_values=[None, -1.5, -2.5], meta=meta),
            response([], [], prompt_values=[None, -1.5, -2.5], finish="abort", meta=meta),
        ]
        rows = sglang.rows_of(as_json(responses))
        batch = open_wire(encode_rows(rows, same_length=["response_ids", "logprobs"]))
        found = batch.to_tensordict()
        assert set(batch.fields) == set(rows[0])
        assert [row.tolist() for row in found["prompt_ids"].unbind()] == [[1, 2, 3]] * 2
        assert [row.tolist() for row in found["logprobs"].unbind()] == [[-0.5, -1.0], []]
        assert [row.tolist() for row in found["routed_experts"].unbind()] == [experts.tolist()] * 2
        assert list(found["finish_reason"]) == ["stop", "abort"]
