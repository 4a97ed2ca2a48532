"""Replies of engines over HTTP as rows: expert ids in base64, and all that may be wrong with it."""

import base64
import io
import json
import math
import pickle
from functools import partial
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

from jagcodec import RowBuilder, decode, encode_rows
from jagcodec.errors import JagcodecError
from jagcodec.integrations import sglang, vllm
from jagcodec.integrations.json_arrays import array_of_envelope, smallest_ids
from tests.helpers import run_python
from tests.test_without_torch import BLOCKED

LAYERS, TOP_K = 3, 2
SHAPE: dict[str, Any] = {"layers": LAYERS, "top_k": TOP_K}


def text_of(data):
    return base64.b64encode(data).decode()


def npy(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def refused(call, reason, path, *details):
    """The call raises an error of this library with this place, whose detail has these words."""
    with pytest.raises(JagcodecError) as raised:
        call()
    assert (raised.value.reason, raised.value.path) == (reason, path), raised.value
    for detail in details:
        assert detail in raised.value.detail


def experts_of(tokens, dtype=np.int32, seed=0):
    """Ids of 48 experts, and those of a token depend on nothing else."""
    whole = np.random.default_rng(seed).integers(0, 48, (64, LAYERS, TOP_K))
    return whole[:tokens].astype(dtype)


# --- envelopes ---------------------------------------------------------------------------------

KINDS = st.sampled_from(
    ["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]
    + ["float16", "float32", "float64"]
)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@settings(max_examples=200)
@given(KINDS.flatmap(lambda kind: hnp.arrays(kind, SHAPES)), st.booleans())
def test_an_envelope_is_its_array(array, short):
    dtype = array.dtype.str if short else array.dtype.name
    envelope = {"data": text_of(array.tobytes()), "shape": list(array.shape), "dtype": dtype}
    found = array_of_envelope(json.loads(json.dumps(envelope)), max_bytes=array.nbytes)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    assert not found.flags.writeable


GOOD = {"data": text_of(bytes(range(8))), "shape": [2, 2], "dtype": "int16"}
DATA = "array_of_envelope(envelope).data"
BAD_ENVELOPES: list[tuple[Any, str, str, str]] = [
    ([GOOD], "bad_type", "array_of_envelope(envelope)", "expected a dict of data, shape and dtype"),
    ({"data": "", "shape": []}, "no_such_field", "array_of_envelope(envelope)", "without 'dtype'"),
    (GOOD | {"data": GOOD["data"][:-1]}, "bad_value", DATA, "was the body cut"),
    (GOOD | {"data": GOOD["data"][:-4]}, "bad_length", DATA, "expected 8 bytes of shape [2, 2]"),
    (GOOD | {"data": "AAEC-wQFBgc="}, "bad_value", DATA, "12 characters that are not: Only base64"),
    (GOOD | {"data": "AAEC\nwQFBgc="}, "bad_value", DATA, "Only base64"),
    (GOOD | {"data": "é" * 12}, "bad_value", DATA, "ASCII"),
    (GOOD | {"data": "\ud800" * 12}, "bad_value", DATA, "ASCII"),
    (GOOD | {"data": [1, 2]}, "bad_type", DATA, "expected base64 in a string, found [1, 2]"),
    (GOOD | {"data": "A" * 1000}, "too_large", DATA, "at most 64 bytes (max_bytes), found 748"),
    (GOOD | {"data": text_of(bytes(65))}, "too_large", DATA, "found 65 in base64; if they"),
    (GOOD | {"shape": [2, 3]}, "bad_length", DATA, "expected 12 bytes of shape [2, 3]"),
    (GOOD | {"shape": [-2, -2]}, "bad_shape", DATA, "sizes from 0 on, found [-2, -2]"),
    (GOOD | {"shape": [2.0, 2]}, "bad_shape", DATA, "sizes from 0 on"),
    (GOOD | {"shape": [True, 4]}, "bad_shape", DATA, "sizes from 0 on"),
    (GOOD | {"shape": [1 << 63, 0]}, "bad_shape", DATA, "sizes from 0 on"),
    (GOOD | {"shape": [1] * 100_000}, "bad_shape", DATA, "found a list of 100000"),
    (GOOD | {"shape": 4}, "bad_shape", "array_of_envelope(envelope).shape", "a list of sizes"),
    (GOOD | {"data": "", "shape": [0, 1 << 62, 8]}, "bad_shape", DATA, "a shape that numpy has"),
    *(
        (GOOD | {"dtype": dtype}, "bad_dtype", "array_of_envelope(envelope).dtype", "of numbers")
        for dtype in ("object", "O", ">i2", "i2,i2", "(2,)i2", "S2", "complex64", "int", None, [])
    ),
    (GOOD | {"dtype": "bool", "shape": [8]}, "bad_value", DATA, "bytes of 0 or 1, found others"),
]


@pytest.mark.parametrize(("envelope", "reason", "path", "detail"), BAD_ENVELOPES)
def test_anything_else_is_not_an_envelope(envelope, reason, path, detail):
    refused(lambda: array_of_envelope(envelope, max_bytes=64), reason, path, detail)


# --- the smallest dtype ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "pad", "dtype"),
    [
        *((256, None, "uint8"), (257, None, "int16"), (1, None, "uint8"), (1 << 16, None, "int32")),
        *((255, 255, "uint8"), (128, -1, "int8"), (129, -1, "int16"), (256, -1, "int16")),
        *((256, 256, "int16"), (1 << 15, -1, "int16"), ((1 << 15) + 1, -1, "int32")),
    ],
)
def test_ids_take_the_smallest_dtype_of_all_experts_and_the_pad(experts, pad, dtype):
    ids = np.array([[0, experts - 1]] + [[pad, 0]] * (pad is not None), dtype=np.int64)
    found = smallest_ids(ids, experts=experts, pad=pad)
    assert found.dtype == dtype
    assert found.tolist() == ids.tolist()
    assert smallest_ids(found, experts=experts, pad=pad) is found
    assert smallest_ids(np.zeros((0, 2), np.int32), experts=experts, pad=pad).dtype == dtype


@given(hnp.arrays(st.sampled_from(["uint8", "int16", "int64", "uint64", ">i4"]), (2, 3)))
def test_without_a_number_of_experts_the_ids_decide(ids):
    found = smallest_ids(ids)
    assert found.tolist() == ids.tolist()
    assert found.itemsize <= ids.itemsize
    assert found.dtype.isnative


BAD_IDS: list[tuple[Any, dict[str, Any], str, str, str]] = [
    ([[1]], {}, "bad_type", "ids", "expected an array of integers, found list"),
    (np.ones(2), {}, "bad_type", "ids", "found float64"),
    (np.array([[1, 8]]), {"experts": 8}, "bad_value", "ids", "ids of 8 experts, found 8 at [0, 1]"),
    (np.array([-1]), {"experts": 8}, "bad_value", "ids", "found -1 at [0]"),
    (np.array([-1, -2]), {"experts": 8, "pad": -1}, "bad_value", "ids", "found -2 at [1]"),
    (
        np.array([1]),
        {"experts": 256, "pad": 255},
        "bad_pad",
        "pad",
        "0 to 255), found 255; pass -1",
    ),
    (np.array([1]), {"experts": 8, "pad": 1.0}, "bad_pad", "pad", "an integer or None, found 1.0"),
    (np.array([1]), {"pad": 255}, "bad_option", "experts", "the number of experts, found None"),
]


@pytest.mark.parametrize(("ids", "options", "reason", "argument", "detail"), BAD_IDS)
def test_other_ids_are_refused(ids, options, reason, argument, detail):
    refused(lambda: smallest_ids(ids, **options), reason, f"smallest_ids({argument})", detail)


# --- vLLM --------------------------------------------------------------------------------------


def choice(ids, logprobs=True, experts=None, **more):
    content = [{"token": f"token_id:{i}", "logprob": -i / 4, "top_logprobs": []} for i in ids]
    return {
        **{"index": 0, "finish_reason": "stop", "token_ids": [*ids]},
        "logprobs": {"content": content} if logprobs else None,
        "routed_experts": None if experts is None else text_of(npy(experts)),
        **more,
    }


def reply(*choices, **more):
    return {
        "request_id": "a",
        "model": "m",
        "choices": [*choices],
        "kv_transfer_params": None,
    } | more


def of_vllm(replies, prompts=None, **options):
    return vllm.rows_of_replies(json.loads(json.dumps(replies)), prompts=prompts, **options)


def test_replies_of_vllm_are_rows():
    of_prompt = [None, {"9": {"logprob": -0.1}, "2": {"logprob": -3, "rank": 4}}]
    replies = [
        reply(
            choice([7, 8], experts=experts_of(3)),
            choice([9], experts=experts_of(2), finish_reason="length"),
            prompt_logprobs=of_prompt,
        ),
        reply(choice([], experts=experts_of(0)), prompt_logprobs=[None]),
    ]
    rows = of_vllm(replies, [[1, 2], [3]])
    found = [row.pop("routed_experts") for row in rows]
    assert [ids.tolist() for ids in found] == [experts_of(n).tolist() for n in (3, 2, 0)]
    assert [ids.shape[1:] for ids in found] == [(LAYERS, TOP_K)] * 3
    first = {"prompt_ids": [1, 2], "prompt_logprobs": [0.0, -3.0]}
    assert rows == [
        first | {"response_ids": [7, 8], "logprobs": [-1.75, -2.0], "finish_reason": "stop"},
        first | {"response_ids": [9], "logprobs": [-2.25], "finish_reason": "length"},
        {
            **{"prompt_ids": [3], "prompt_logprobs": [0.0], "response_ids": []},
            **{"logprobs": [], "finish_reason": "stop"},
        },
    ]
    rows[0]["prompt_ids"].append(0)  # lists belong to their row
    assert rows[1]["prompt_ids"] == [1, 2]


def test_what_vllm_did_not_send_is_in_no_row():
    (row,) = of_vllm(reply(choice([7], logprobs=False)))
    assert row == {"response_ids": [7], "finish_reason": "stop"}


@settings(max_examples=100)
@given(
    st.sampled_from(["uint8", "int16", "uint16", "int32", "int64"]),
    st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 3)),
    st.booleans(),
)
def test_arrays_of_numpy_save_arrive(dtype, shape, fortran):
    sent = (np.arange(math.prod(shape)) % 200).astype(dtype).reshape(shape)
    sent = np.asfortranarray(sent) if fortran else sent
    (row,) = of_vllm(reply(choice([7], experts=sent)), [[1] * shape[0]], max_bytes=len(npy(sent)))
    found = row["routed_experts"]
    assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
    assert found.tolist() == sent.tolist()
    assert not found.flags.writeable


def test_expert_ids_arrive_at_a_trainer_of_one_dtype():
    replies = [reply(choice([7] * n, experts=experts_of(n, np.int16))) for n in (1, 4)]
    rows = of_vllm(replies, [[1]] * 2)
    for row in rows:
        row["routed_experts"] = smallest_ids(row["routed_experts"], experts=48, pad=-1)
    column = decode(encode_rows(rows))["routed_experts"]
    assert [part.tolist() for part in column.unbind()] == [experts_of(n).tolist() for n in (1, 4)]
    assert str(column.dtype) == "torch.int8"


class Opened:
    """What a pickle would call."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was read",)


def with_header(text, data=b"", version=b"\x01\x00"):
    """A .npy file with this header."""
    size = len(text).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    return b"\x93NUMPY" + version + size + text.encode() + data


def header(shape="(1, 1, 2)", descr="'<i2'", fortran="False"):
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n"


HUGE = header("(1000000, 1000000, 1000000)")
BAD_NPY = {
    "empty": (b"", "bad_value", "0 bytes without its header"),
    "cut in the header": (npy(experts_of(1))[:40], "bad_value", "without its header"),
    "cut in the cells": (npy(experts_of(1))[:-1], "bad_length", "expected 24 bytes"),
    "more cells": (npy(experts_of(1)) + b"\x00", "bad_length", "found 25"),
    "objects": (
        *(npy(np.array([[[Opened()]]], object), allow_pickle=True), "bad_dtype"),
        "of numbers, such as 'bool'",
    ),
    "a pickle": (pickle.dumps(Opened()), "bad_value", "without its header"),
    "an npz": (b"PK\x03\x04" + bytes(40), "bad_value", "without its header"),
    "fields": (npy(np.zeros((1, 1, 1), "i2,i2")), "bad_dtype", "dtype of numbers"),
    "other order of bytes": (npy(np.zeros((1, 1, 1), ">i2")), "bad_dtype", "found '>i2'"),
    "floats": (npy(np.zeros((1, 1, 2))), "bad_shape", "expected integers of shape (tokens, layers"),
    "two dims": (npy(np.zeros((1, 2), np.uint8)), "bad_shape", "found uint8 of shape [1, 2]"),
    "huge": (with_header(HUGE, bytes(8)), "bad_length", "2000000000000000000 bytes"),
    "negative": (with_header(header("(-1, -1, 2)"), bytes(4)), "bad_shape", "sizes from 0 on"),
    "a bool as a size": (with_header(header("(True, 1, 2)"), bytes(4)), "bad_shape", "sizes from"),
    "a long header": (with_header(header() + " " * 2000, bytes(4)), "bad_value", "header"),
    "deep": (with_header("(" * 900 + ")" * 900), "bad_value", "header"),
    "not closed": (with_header("{'descr': '''"), "bad_value", "header"),
    "code": (with_header(header(descr="__import__('os')")), "bad_value", "header"),
    "no shape": (with_header("{'descr': '<i2', 'fortran_order': False}"), "bad_value", "header"),
    "no such dtype": (with_header(header(descr="'<q9'")), "bad_value", "header"),
    "version 3": (with_header(header(), bytes(4), b"\x03\x00"), "bad_value", "version 1 or 2"),
    "version 9": (with_header(header(), bytes(4), b"\x09\x00"), "bad_value", "version 1 or 2"),
}


@pytest.mark.filterwarnings("ignore:Reading `.npy`")
@pytest.mark.parametrize("case", BAD_NPY)
def test_anything_else_is_not_an_array_of_expert_ids(case):
    data, reason, detail = BAD_NPY[case]
    given = [reply(choice([7])), reply(choice([7], routed_experts=text_of(data)))]
    path = "vllm.rows_of_replies(replies)[1].choices[0].routed_experts"
    refused(lambda: of_vllm(given), reason, path, detail)


def test_a_good_header_of_version_2_is_read():
    data = with_header(header(), bytes(4), b"\x02\x00")
    (row,) = of_vllm(reply(choice([7], routed_experts=text_of(data))))
    assert row["routed_experts"].tolist() == [[[0, 0]]]


OF_REPLY = "vllm.rows_of_replies(replies)[0]"
OF_CHOICE = f"{OF_REPLY}.choices[0]"
EXPERTS = experts_of(2)
BAD_REPLIES: list[tuple[Any, Any, str, str, str]] = [
    ("text", None, "bad_type", OF_REPLY[:-3], "expected a list of replies of vLLM"),
    ([{"error": {}}], None, "bad_type", OF_REPLY, "found KeyError: 'choices'; leave out failed"),
    ([3], None, "bad_type", OF_REPLY, "a reply of vLLM's /inference/v1/generate, found Attribute"),
    ([{"choices": 3}], None, "bad_type", OF_REPLY, "a reply of vLLM's"),
    ([reply({"index": 0})], None, "bad_type", OF_CHOICE, "found KeyError: 'token_ids'"),
    ([reply({"token_ids": None})], None, "bad_type", OF_CHOICE, "a choice of vLLM's"),
    (
        [reply(choice([7], logprobs=None) | {"logprobs": {}})],
        None,
        "bad_type",
        OF_CHOICE,
        "content",
    ),
    (
        *([reply(choice([7]) | {"token_ids": [8]})], None, "row_mismatch"),
        *(f"{OF_CHOICE}.logprobs.content[0]", "expected 'token_id:8' like token_ids, found"),
    ),
    (
        *([reply(choice([7]) | {"token_ids": [7, 7]})], None, "bad_length"),
        *(f"{OF_CHOICE}.logprobs", "expected 2 items like token_ids, found 1"),
    ),
    (
        *([reply(choice([7]), prompt_logprobs=[None])], None, "bad_option"),
        *(f"{OF_REPLY}.prompt_logprobs", "pass prompts="),
    ),
    (
        *([reply(choice([7]), prompt_logprobs=[None, {"3": {}}])], [[1, 2]], "bad_shape"),
        *(
            f"{OF_REPLY}.prompt_logprobs[1]",
            "expected the logprob of token 2, found those of ['3']",
        ),
    ),
    (
        *([reply(choice([7]))], [[1], [2]], "bad_length"),
        *("vllm.rows_of_replies(prompts)", "expected 1 items like replies, found 2"),
    ),
    (
        *([reply(choice([7]))], [["a"]], "bad_type"),
        *("vllm.rows_of_replies(prompts)[0]", "expected a list of token ids"),
    ),
    (
        *([reply(choice([7], experts=EXPERTS))], [[1]], "bad_length"),
        *(
            f"{OF_CHOICE}.routed_experts",
            "expected 1 tokens, all of prompt and response but the last",
        ),
    ),
    (
        *([reply(choice([7], experts=EXPERTS), choice([7]))], None, "row_mismatch"),
        *(f"{OF_REPLY}.choices[1]", "expected routed_experts in all samples or in none"),
    ),
    (
        *([reply(choice([7], routed_experts={}))], None, "bad_type"),
        *(f"{OF_CHOICE}.routed_experts", "expected base64 in a string, found a dict of 0"),
    ),
    (
        *([reply(choice([7], experts=np.zeros((40, 8, 8), np.uint8)))], None, "too_large"),
        *(f"{OF_CHOICE}.routed_experts", "expected at most 1000 bytes (max_bytes)"),
    ),
]


@pytest.mark.parametrize(("replies", "prompts", "reason", "path", "detail"), BAD_REPLIES)
def test_anything_else_of_vllm_over_http_is_refused(replies, prompts, reason, path, detail):
    refused(lambda: of_vllm(replies, prompts, max_bytes=1000), reason, path, detail)


# --- SGLang ------------------------------------------------------------------------------------


def response(experts, prompt=4, ids=(7, 8), start=0, **meta):
    """A response with the ids of these tokens from `start` on."""
    found = {"finish_reason": {"type": "stop"}, "prompt_tokens": prompt}
    found |= {"routed_experts": text_of(experts[start:].tobytes())}
    return {"output_ids": [*ids], "meta_info": found | meta}


@settings(max_examples=100)
@given(
    st.sampled_from(["int32", "uint8", "uint16"]),
    st.tuples(st.integers(0, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.data(),
)
def test_ids_of_sglang_have_a_row_for_each_token_but_the_last(dtype, lengths, shape, data):
    prompt, count = lengths
    tokens = prompt + count - 1
    whole = (np.arange(tokens * math.prod(shape)) % 250).astype(dtype).reshape(tokens, *shape)
    start = data.draw(st.integers(0, tokens))
    more = data.draw(st.integers(0, 3))  # of an earlier answer that the new prompt dropped
    earlier = np.concatenate([whole[:start], np.full((more, *shape), 99, dtype)])
    sent = response(whole, prompt, range(count), start, routed_experts_dtype=dtype)
    options = {"layers": shape[0], "top_k": shape[1], "earlier": [earlier] if start else None}
    for starts in (start, [start]):
        (row,) = sglang.rows_of(json.loads(json.dumps(sent)), start_len=starts, **options)
        assert row["routed_experts"].tolist() == whole.tolist()
    sent["meta_info"]["routed_experts_start_len"] = start
    (row,) = sglang.rows_of(sent, **options)
    assert row["routed_experts"].tolist() == whole.tolist()
    assert row["routed_experts"].dtype == dtype


@given(st.integers(0, 5), st.booleans(), st.sampled_from([(None, "uint8"), (-1, "int8")]))
def test_turns_of_sglang_are_joined_in_the_smallest_dtype(start, kept_wide, pad):
    """Each turn sends the ids of its new tokens alone, or also some of those before."""
    whole = experts_of(9)
    known = {**SHAPE, "experts": 48, "pad": pad[0]}
    (first,) = sglang.rows_of(response(whole[:5]), **known)
    assert (first["routed_experts"].dtype, len(first["routed_experts"])) == (pad[1], 5)
    kept = whole[:5] if kept_wide else first["routed_experts"]
    second = response(whole, prompt=8, start=start, routed_experts_start_len=start)
    (row,) = sglang.rows_of(second, earlier=[kept], **known)
    assert row["routed_experts"].tolist() == whole.tolist()
    assert row["routed_experts"].dtype == pad[1]

    grown = RowBuilder()
    grown.append(experts=kept)
    (row,) = sglang.rows_of(second, start_len=[start], **known)
    assert row["routed_experts"].tolist() == whole[start:].tolist()
    grown.append({"experts": start}, experts=row["routed_experts"].astype(kept.dtype))
    assert grown.to_row()["experts"].tolist() == whole.tolist()


def test_readers_of_replies_check_ids_and_their_number():
    """As `smallest_ids` does, at the place in the reply."""
    sglang_path = "sglang.rows_of(responses)[1].routed_experts"
    first = response(experts_of(0), prompt=1, ids=[])
    both = [first, response(IDS)]
    high = int(IDS.max())
    at = np.argwhere(high == IDS)[0].tolist()
    said = f"expected ids of {high} experts, found {high} at {at}"
    options = {**SHAPE, "experts": high}
    refused(lambda: sglang.rows_of(both, **options), "bad_value", sglang_path, said)
    replies = [reply(choice([7, 8, 9], experts=IDS))]
    vllm_path = f"{OF_CHOICE}.routed_experts"
    refused(lambda: of_vllm(replies, experts=high), "bad_value", vllm_path, said)
    bad: list[tuple[dict[str, Any], str, str, str]] = [
        ({"experts": 0}, "bad_option", "experts", "found 0"),
        ({"pad": -1}, "bad_option", "experts", "found None"),
        ({"experts": 8, "pad": 7}, "bad_pad", "pad", "pass -1"),
    ]
    for options, reason, name, detail in bad:
        for call, where in ((sglang.rows_of, "sglang.rows_of"), (of_vllm, "vllm.rows_of_replies")):
            refused(partial(call, [], **options), reason, f"{where}({name})", detail)
    (row,) = of_vllm(replies, experts=high + 1, pad=-1)
    assert (row["routed_experts"].tolist(), row["routed_experts"].dtype) == (IDS.tolist(), np.int8)


IDS = experts_of(5)
OF_RESPONSE = "sglang.rows_of(responses)[1].routed_experts"
BAD_RESPONSES: list[tuple[dict[str, Any], dict[str, Any], str, str, str]] = [
    (
        response(IDS[:4]),
        SHAPE,
        "bad_length",
        OF_RESPONSE,
        "5 tokens x 3 layers x 2 experts = 30 ids",
    ),
    (response(IDS), {**SHAPE, "top_k": 4}, "bad_length", OF_RESPONSE, "= 60 ids, found 30; check"),
    (response(IDS, start=2), SHAPE, "bad_length", OF_RESPONSE, "found 18"),
    (
        *(response(IDS, start=2, routed_experts_start_len=2), SHAPE, "bad_length", OF_RESPONSE),
        "expert ids of the first 2 tokens in earlier=, found 0; pass those of the turn before",
    ),
    (
        *(response(IDS, start=3), {**SHAPE, "start_len": [0, 2]}, "bad_length", OF_RESPONSE),
        "expected 3 tokens x 3 layers x 2 experts = 18 ids, found 12",
    ),
    (
        response(IDS - 100, start=2),
        {**SHAPE, "start_len": [0, 2], "earlier": [None, IDS], "experts": 48},
        *("bad_value", OF_RESPONSE, "expected ids of 48 experts"),
    ),
    (
        response(IDS, start=2),
        {**SHAPE, "start_len": [0, 2], "earlier": [None, IDS + 100], "experts": 48},
        *("bad_value", "sglang.rows_of(earlier)[1]", "expected ids of 48 experts"),
    ),
    (
        *(response(IDS, start=2), {**SHAPE, "start_len": [0, 2], "earlier": [None, IDS[:1]]}),
        *("bad_length", OF_RESPONSE, "the first 2 tokens in earlier=, found 1"),
    ),
    (
        *(response(IDS, start=2), {**SHAPE, "start_len": [0, 2], "earlier": [None, IDS[:2, :1]]}),
        *(
            "bad_shape",
            "sglang.rows_of(earlier)[1]",
            "(tokens, *[3, 2]), found int32 of shape (2, 1",
        ),
    ),
    (
        *(response(IDS, start=2), {**SHAPE, "start_len": [0, 2], "earlier": [None, IDS[:2] / 1]}),
        *("bad_shape", "sglang.rows_of(earlier)[1]", "expected int32 or smaller"),
    ),
    *(
        (
            *(response(IDS, start=2), {**SHAPE, "start_len": [0, 2], "earlier": [None, earlier]}),
            *("bad_shape", "sglang.rows_of(earlier)[1]", "expected int32 or smaller"),
        )
        for earlier in (7, [[1]], np.int64(7), IDS.astype(np.uint32))
    ),
    (
        *(response(IDS), {"start_len": [0, 2]}, "bad_option", OF_RESPONSE),
        "expected layers= and top_k= for expert ids that start at token 2, found neither",
    ),
    (
        *(response(IDS, routed_experts_start_len=-1), {}, "bad_option", f"{OF_RESPONSE}_start_len"),
        "expected 0 or more, found -1",
    ),
    (
        *(response(IDS), {"start_len": [0]}, "bad_length", "sglang.rows_of(start_len)"),
        "expected 2 items like responses, found 1",
    ),
    (
        *(response(IDS), {"earlier": [None]}, "bad_length", "sglang.rows_of(earlier)"),
        "expected 2 items like responses, found 1",
    ),
    (
        response(IDS),
        {"layers": 3},
        "bad_option",
        "sglang.rows_of(top_k)",
        "1 or more, for layers and",
    ),
    (response(IDS), {"layers": 0, "top_k": 1}, "bad_option", "sglang.rows_of(layers)", "found 0"),
    (
        *(response(IDS, routed_experts="AAAA!AAAAAAAAAAAA"), {}, "bad_value", OF_RESPONSE),
        "expected base64",
    ),
    (response(IDS, routed_experts="AAAA"), {}, "bad_length", OF_RESPONSE, "a multiple of 4 bytes"),
    (
        *(response(IDS, routed_experts_dtype="int"), {}, "bad_dtype", f"{OF_RESPONSE}_dtype"),
        "expected a dtype of numbers",
    ),
    (response(IDS), {"max_bytes": 119}, "too_large", OF_RESPONSE, "at most 119 bytes"),
]


@pytest.mark.parametrize(("bad", "options", "reason", "path", "detail"), BAD_RESPONSES)
def test_ids_of_sglang_that_do_not_fit_are_refused(bad, options, reason, path, detail):
    good = response(IDS[:0], prompt=1, ids=[])
    refused(lambda: sglang.rows_of([good, bad], **options), reason, path, detail)


def test_lists_of_responses_may_not_be_endlessly_deep():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    place = "sglang.rows_of(responses)"
    refused(lambda: sglang.rows_of(deep), "bad_type", place, "found RecursionError")


# --- without torch -----------------------------------------------------------------------------

PRODUCER = """
import sys
import numpy as np
from jagcodec import encode_rows, to_blob
from jagcodec.integrations import json_arrays, sglang, vllm
(row,) = vllm.rows_of_replies({reply}, prompts=[[1, 2]])
(other,) = sglang.rows_of({response}, layers=3, top_k=2, experts=48)
assert other["routed_experts"].dtype == np.uint8
assert (row["routed_experts"][:3] == other["routed_experts"][:3]).all()
row["mask"] = json_arrays.array_of_envelope({mask})
row["routed_experts"] = json_arrays.smallest_ids(row["routed_experts"], experts=48)
open({file}, "wb").write(to_blob(encode_rows([row])))
print(sorted({{"torch", "tensordict"}} & {{*sys.modules}}))
"""


def test_a_producer_without_torch_reads_replies_and_writes_rows(tmp_path):
    file = tmp_path / "rows.jag"
    mask = {"data": "AAAAAQ==", "shape": [4], "dtype": "bool"}
    code = PRODUCER.format(
        reply=reply(choice([7, 8], experts=experts_of(3))),
        response=response(experts_of(5)),
        mask=mask,
        file=repr(str(file)),
    )
    assert run_python(BLOCKED + code).stdout == "[]\n"
    td = decode(file.read_bytes())
    assert td["routed_experts"].values().tolist() == experts_of(3).tolist()
    assert td["mask"].values().tolist() == [False, False, False, True]
