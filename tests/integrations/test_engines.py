"""What vLLM and SGLang return, as rows: stand-ins with the names and types of their fields."""

import base64
import json
from collections import UserList
from types import SimpleNamespace as Of
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jagcodec import ArgumentError
from jagcodec.integrations import sglang, vllm

ROW = {"prompt_ids": [1, 2, 3], "response_ids": [7, 8], "logprobs": [-0.5, -2.0]}
ROW |= {"finish_reason": "stop"}


def assert_refused(module, value, path, detail):
    given = "outputs" if module is vllm else "responses"
    with pytest.raises(ArgumentError) as raised:
        module.rows_of(value)
    assert raised.value.path == f"{module.__name__.rpartition('.')[2]}.rows_of({given}){path}"
    assert detail in raised.value.detail


class FlatLogprobs(UserList):
    """Not a list, and no None in it: a position without logprobs is an empty dict."""

    def __init__(self, positions):
        super().__init__(position or {} for position in positions)


def at(tokens, values):
    """A dict of logprobs for each token; the sampled one is not the most likely."""
    pairs = zip(tokens, values, strict=True)
    return [{999: Of(logprob=-0.001), token: Of(logprob=value)} for token, value in pairs]


def sample(tokens, logprobs=None, finish_reason="stop", routed_experts=None):
    found = {"token_ids": tokens, "logprobs": logprobs, "finish_reason": finish_reason}
    return Of(**found, routed_experts=routed_experts)


def request(prompt, *samples, prompt_logprobs=None):
    return Of(prompt_token_ids=prompt, prompt_logprobs=prompt_logprobs, outputs=[*samples])


def of_sample(tokens, positions):
    """These logprobs of the second sample; those of the first are right."""
    return [request([1], sample([7], at([7], [-0.5])), sample(tokens, positions))]


def of_prompt(logprobs):
    return [request([1, 2], sample([7]), prompt_logprobs=logprobs)]


SAMPLE, PROMPT = "[0].outputs[1]", "[0].prompt_logprobs"
REFUSED_OF_VLLM: list[tuple[Any, str, str]] = [
    (of_sample([7, 8], at([7], [0])), f"{SAMPLE}.logprobs", "2 items like token ids, found 1"),
    (of_sample([7], [{8: Of(logprob=0)}]), f"{SAMPLE}.logprobs[0]", "token 7, found those of [8]"),
    (of_sample([7], [None]), f"{SAMPLE}.logprobs[0]", "logprob of token 7, found None"),
    (of_sample([7], [{}]), f"{SAMPLE}.logprobs[0]", "logprob of token 7, found those of []"),
    (of_sample([7], at([7], [None])), f"{SAMPLE}.logprobs[0]", "expected a logprob, found None"),
    (of_sample([7], at([7], ["-1"])), f"{SAMPLE}.logprobs[0]", "expected a logprob, found '-1'"),
    (of_sample([7], [{7: -0.5}]), SAMPLE, "a CompletionOutput of vLLM, found AttributeError"),
    (of_sample([7.0], at([7], [-0.5])), SAMPLE, "a CompletionOutput of vLLM, found TypeError"),
    (of_prompt([None, None]), f"{PROMPT}[1]", "logprob of token 2"),
    (of_prompt([None]), PROMPT, "expected 2 items"),
    (of_prompt(at([9, 2], [-0.5, -0.5])), f"{PROMPT}[0]", "logprob of token 1"),
    ([request([1], sample([7])), *of_prompt([None, *at([2], [-1])])], "[0].outputs[0]", "in none"),
    (3, "", "a list of vLLM's RequestOutputs"),
    ([request([1]), {"outputs": []}], "[1]", "a RequestOutput of vLLM"),
    ([request(["a"])], "[0]", "a RequestOutput of vLLM"),
    ([request([1], sample([7]), None)], SAMPLE, "a CompletionOutput of vLLM"),
]


class TestVllm:
    @pytest.mark.parametrize("container", [list, FlatLogprobs])
    def test_samples_are_rows_with_their_prompt_and_the_logprobs_of_sampled_tokens(self, container):
        experts = [np.full((4, 2, 2), value, dtype=np.uint8) for value in range(3)]
        outputs = [
            request(
                [1, 2],
                sample((7, 8), container(at([7, 8], [-0.5, -2])), routed_experts=experts[0]),
                sample([9], container(at([9], [-2.0])), "length", experts[1]),
                prompt_logprobs=container([None, *at([2], [np.float32(-1.5)])]),
            ),
            request(np.array([4]), sample([], [], "abort", experts[2]), prompt_logprobs=[None]),
        ]
        rows = vllm.rows_of(outputs)
        for row, array in zip(rows, experts, strict=True):
            assert row.pop("routed_experts") is array
        prompt = {"prompt_ids": [1, 2], "prompt_logprobs": [0.0, -1.5]}  # the first is zero
        aborted = {"prompt_ids": [4], "prompt_logprobs": [0.0], "finish_reason": "abort"}
        assert rows == [
            {**prompt, "response_ids": [7, 8], "logprobs": [-0.5, -2.0], "finish_reason": "stop"},
            {**prompt, "response_ids": [9], "logprobs": [-2.0], "finish_reason": "length"},
            {**aborted, "response_ids": [], "logprobs": []},
        ]
        for name, kind in (("prompt_ids", int), ("logprobs", float), ("prompt_logprobs", float)):
            assert {type(number) for row in rows for number in row[name]} == {kind}
        rows[0]["prompt_ids"].append(0)  # lists belong to their row
        rows[0]["prompt_logprobs"].append(0.0)
        assert (rows[1]["prompt_ids"], rows[1]["prompt_logprobs"]) == ([1, 2], [0.0, -1.5])
        assert outputs[0].prompt_token_ids == [1, 2]

    def test_what_was_asked_for_of_no_sample_is_in_no_row(self):
        older = sample([])
        del older.routed_experts
        rows = vllm.rows_of([request(None, sample([7]), older)])
        assert [list(row) for row in rows] == [["response_ids", "finish_reason"]] * 2

    @pytest.mark.parametrize("key", ["logprobs", "routed_experts", "finish_reason"])
    @pytest.mark.parametrize("bad", [0, 1, 2])
    def test_the_first_sample_without_what_others_have_is_named(self, key, bad):
        experts = np.zeros((2, 2, 2), dtype=np.uint8)
        samples = [sample([7], at([7], [-0.5]), routed_experts=experts) for _ in range(3)]
        for one in samples[bad : 3 if bad == 1 else bad + 1]:
            setattr(one, key, None)
        outputs = [request([1], samples[0]), request([1], *samples[1:])]
        path = f"[{int(bad > 0)}].outputs[{int(bad == 2)}]"
        assert_refused(vllm, outputs, path, f"expected {key} in all samples or in none")


def response(tokens, values, *, finish="stop", prompt_values=(), meta=None, **more):
    """What /generate returns, with or without ``return_logprob``."""
    prompt = [1, 2, 3]
    found = {"finish_reason": {"type": finish, "matched": 8}, "prompt_tokens": len(prompt)}
    if values is not None:
        prompt = prompt[len(prompt) - len(prompt_values) :]
        for name, numbers, ids in (("input", prompt_values, prompt), ("output", values, tokens)):
            triples = [(*pair, None) for pair in zip(numbers, ids, strict=True)]
            found[f"{name}_token_logprobs"] = triples
    return {"output_ids": list(tokens), "meta_info": {**found, **(meta or {})}, **more}


WHOLE = [None, -1.5, -2.5]


def prompt_triples(*tokens):
    """The part of `meta_info` with the logprobs of these tokens of a prompt."""
    return {"input_token_logprobs": [(*pair, None) for pair in zip(WHOLE, tokens, strict=True)]}


PLAIN, WITHOUT = response([7], [-0.5]), response([7], None)
WAITED = response([], [], finish="abort")  # aborted while it waited: it has no prompt
del WAITED["meta_info"]["prompt_tokens"]
UNCOUNTED = response([7], [-0.5], prompt_values=WHOLE)
del UNCOUNTED["meta_info"]["prompt_tokens"]


def of_triples(kind, triples):
    """A good response, and one with these logprobs."""
    meta = {f"{kind}_token_logprobs": triples}
    return [PLAIN, response([7, 8], [0, 0], meta=meta)]


OUTPUT, INPUT = "[1].output_token_logprobs", "[1].input_token_logprobs"
REFUSED_OF_SGLANG = [
    (of_triples("output", [(-0.5, 7, None)]), OUTPUT, "2 items like output_ids, found 1"),
    (of_triples("output", [(0, 7, 0), (0, 9, 0)]), f"{OUTPUT}[1]", "8 like output_ids, found 9"),
    (of_triples("output", [(0, 7, 0), (None, 8, 0)]), f"{OUTPUT}[1]", "a logprob, found None"),
    (of_triples("input", [(None, 2, 0), (-2.5, 3, 0)]), INPUT, "3 tokens of the prompt, found 2"),
    ([PLAIN, UNCOUNTED], INPUT, "`prompt_token_ids` or `prompt_tokens` beside logprobs"),
    ([[PLAIN, PLAIN], [PLAIN, WITHOUT]], "[1][1]", "expected logprobs in all samples or in none"),
    ([response([7], [0], prompt_values=WHOLE), WAITED], "[1]", "in all samples or in none"),
    *(
        ([WITHOUT, bad], "[1]", "expected a response of SGLang's /generate, found ")
        for bad in (
            "text",
            {"meta_info": {}, "output_ids": []},
            {"meta_info": {"finish_reason": None}},
            response(["a"], None),
            response([7], None, meta={"finish_reason": "stop"}),
            response([7], None, meta={"output_token_logprobs": [(-0.5, 7)]}),
        )
    ),
]


# The logprobs of a response of SGLang, and the token ids that they belong to.
TOKENS_OF = [
    ("input_token_logprobs", "prompt_token_ids"),
    ("output_token_logprobs", "output_ids"),
]


class TestSglang:
    @pytest.mark.parametrize(
        ("prompt_values", "more", "ids", "logprobs"),
        [
            (WHOLE, {}, [1, 2, 3], [0.0, -1.5, -2.5]),
            ([-0.75, -1.5, -2.5], {}, [1, 2, 3], [-0.75, -1.5, -2.5]),
            (WHOLE, {"prompt_token_ids": [1, 2, 3]}, [1, 2, 3], [0.0, -1.5, -2.5]),
            # Triples have 0 where the prompt has an image.
            (
                WHOLE,
                {"prompt_token_ids": [1, 90_000, 3], "meta": prompt_triples(1, 0, 3)},
                [1, 90_000, 3],
                [0.0, -1.5, -2.5],
            ),
            (WHOLE, {"meta": prompt_triples(1, 0, 3)}, [1, 0, 3], [0.0, -1.5, -2.5]),
            # Older versions return the last token of a prompt, without a logprob.
            ([None], {}, None, None),
            ((), {"prompt_token_ids": [1, 2, 3]}, [1, 2, 3], None),
        ],
    )
    def test_logprobs_are_those_of_the_sampled_tokens(self, prompt_values, more, ids, logprobs):
        responses = [response([7, 8], [-0.5, -2.0], prompt_values=prompt_values, **more)]
        expected = ROW | {"prompt_ids": ids, "prompt_logprobs": logprobs}
        expected = {name: value for name, value in expected.items() if value is not None}
        for form in (responses, json.loads(json.dumps(responses))):
            assert sglang.rows_of(form) == [expected]

    def test_one_response_and_batches_of_batches_with_logprobs_and_without(self):
        assert [row["response_ids"] for row in sglang.rows_of(PLAIN)] == [[7]]
        rows = sglang.rows_of([[PLAIN, response([8], [-1.0])], (response([], []),), [], WAITED])
        assert [row["response_ids"] for row in rows] == [[7], [8], [], []]
        assert [row["logprobs"] for row in rows] == [[-0.5], [-1.0], [], []]
        assert sglang.rows_of([WITHOUT, response([], None, finish="abort")]) == [
            {"response_ids": [7], "finish_reason": "stop"},
            {"response_ids": [], "finish_reason": "abort"},
        ]

    @pytest.mark.parametrize("dtype", [None, "int32", "uint8", "uint16"])
    def test_routed_experts_are_decoded(self, dtype):
        sent = np.arange(24, dtype=dtype or "int32").reshape(4, 3, 2)
        meta = {"routed_experts": base64.b64encode(sent.tobytes()).decode()}
        meta |= {"routed_experts_dtype": dtype} if dtype else {}
        (row,) = sglang.rows_of([response([7, 8], [-0.5, -1.0], meta=meta)])
        assert row["routed_experts"].dtype == sent.dtype
        assert row["routed_experts"].reshape(-1, 3, 2).tolist() == sent.tolist()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.sampled_from(TOKENS_OF), st.data())
def test_sglang_logprob_of_another_token_is_refused_and_named(ids, names, data):
    key, ids_key = names
    wrong, other = data.draw(st.integers(0, len(ids) - 1)), data.draw(st.integers(1, 9))
    tokens = [*ids[:wrong], other, *ids[wrong + 1 :]]
    one = response([], [])
    one[ids_key], one["meta_info"][key] = ids, [(-0.5, token, None) for token in tokens]
    if tokens == ids:
        assert sglang.rows_of(one)[0]["logprobs"] == [-0.5] * len(one["output_ids"])
        return
    detail = f"expected token {ids[wrong]} like {ids_key}, found {other}"
    assert_refused(sglang, [PLAIN, one], f"[1].{key}[{wrong}]", detail)


@pytest.mark.parametrize(("returned", "path", "detail"), REFUSED_OF_SGLANG)
def test_anything_else_of_sglang_is_refused_and_named(returned, path, detail):
    assert_refused(sglang, returned, path, detail)


@pytest.mark.parametrize(("returned", "path", "detail"), REFUSED_OF_VLLM)
def test_anything_else_of_vllm_is_refused_and_named(returned, path, detail):
    assert_refused(vllm, returned, path, detail)
