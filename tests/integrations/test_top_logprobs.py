"""The most likely tokens of vLLM's positions: next to a model of vLLM's own loop, and to numpy."""

import json
import re
from types import SimpleNamespace as Of
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jagcodec import ArgumentError, decode, encode_rows
from jagcodec.errors import ArgumentTypeError
from jagcodec.integrations import vllm

WORDS = 9  # of the vocabulary


def position_of(values, sampled, k):
    """The dict of a position, as vllm/logprobs.py makes it: the sampled token, then the top k."""
    rank = int((values >= values[sampled]).sum())
    best = np.argsort(-values, kind="stable")[:k]
    position = {sampled: Of(logprob=float(values[sampled]), rank=rank, decoded_token=None)}
    for at, token in enumerate(best.tolist(), start=1):
        position[token] = Of(logprob=float(values[token]), rank=at, decoded_token=None)
    return position


class Flat:
    """As vLLM's `FlatLogprobs`: no list; a position without logprobs is an empty dict."""

    def __init__(self, positions):
        self.positions = positions

    def __len__(self):
        return len(self.positions)

    def __iter__(self):
        return iter([position or {} for position in self.positions])


def content_of(position, sampled, n):
    """A position over HTTP, as vLLM's `_create_tokens_logprobs` makes it: cut at n, no ranks."""
    entries = [
        {"token": f"token_id:{token}", "logprob": max(one.logprob, -9999.0)}
        for i, (token, one) in enumerate(position.items())
        if i < max(n, 1)
    ]
    one = {"token": f"token_id:{sampled}", "logprob": position[sampled].logprob}
    return one | {"top_logprobs": entries}


def over_http(positions):
    """The positions of a prompt over HTTP."""
    return [x and {str(token): vars(one) for token, one in x.items()} for x in positions]


LOGPROBS = st.sampled_from([-0.25, -0.5, -1.0, -2.5, -7.0, -9999.0, -float("inf")])
VOCABULARY = st.lists(LOGPROBS, min_size=WORDS, max_size=WORDS).map(np.array)
SAMPLED = st.lists(st.tuples(VOCABULARY, st.integers(0, WORDS - 1)), max_size=4)


def assert_top(ids, logprobs, vocabularies, k):
    """The ids are those of k largest logprobs, each once, and the largest comes first."""
    assert (ids.dtype, logprobs.dtype) == (np.int64, np.float32)
    assert ids.shape == logprobs.shape == (len(vocabularies), k)
    for row, found, values in zip(ids.tolist(), logprobs, vocabularies, strict=True):
        assert len({*row}) == k
        assert found.tolist() == sorted(values.tolist())[::-1][:k]
        assert found.tolist() == values[row].tolist()


@given(SAMPLED, SAMPLED, st.integers(1, 4), st.integers(0, 3), st.sampled_from([list, Flat]))
def test_the_top_k_are_those_of_the_vocabulary_whichever_token_was_sampled(
    sampled, prompt, k, more, container
):
    made = [position_of(values, token, k + more) for values, token in sampled]
    of_prompt = [None, *(position_of(values, token, k + more) for values, token in prompt)]
    ids, prompt_ids = ([token for _, token in each] for each in (sampled, prompt))
    sample = Of(token_ids=ids, logprobs=container(made), finish_reason="stop")
    request = Of(
        prompt_token_ids=[5, *prompt_ids],
        prompt_logprobs=container(of_prompt),
        outputs=[sample] * 2,
    )
    rows = vllm.rows_of([request], top=k, prompt_top=k)
    plain = vllm.rows_of([request])
    for row, without in zip(rows, plain, strict=True):
        assert {name: row[name] for name in without} == without
        assert_top(row["top_ids"], row["top_logprobs"], [values for values, _ in sampled], k)
        found = row["prompt_top_ids"], row["prompt_top_logprobs"]
        assert [each[0].tolist() for each in found] == [[0] * k] * 2
        assert_top(found[0][1:], found[1][1:], [values for values, _ in prompt], k)
    rows[0]["prompt_top_ids"][:] = rows[0]["top_ids"][:] = -1  # arrays belong to their row
    assert (rows[1]["prompt_top_ids"] >= 0).all()
    assert (rows[1]["top_ids"] >= 0).all()


@given(SAMPLED, SAMPLED, st.integers(1, 4), st.integers(1, 3))
def test_replies_over_http_have_the_same_top_k_with_one_more(sampled, prompt, k, more):
    made = [position_of(values, token, k + more) for values, token in sampled]
    pairs = zip(made, sampled, strict=True)
    content = [content_of(position, token, k + more) for position, (_, token) in pairs]
    choice = {"token_ids": [token for _, token in sampled], "logprobs": {"content": content}}
    of_prompt = [None, *(position_of(values, token, k) for values, token in prompt)]
    reply = {"choices": [choice], "prompt_logprobs": over_http(of_prompt)}
    prompts = [[5, *(token for _, token in prompt)]]
    replies = json.loads(json.dumps(reply))
    (row,) = vllm.rows_of_replies(replies, prompts=prompts, top=k, prompt_top=k)
    clamped = [np.maximum(values, -9999.0) for values, _ in sampled]
    for found, values in zip(row["top_logprobs"], clamped, strict=True):
        assert found.tolist() == sorted(values.tolist())[::-1][:k]
    for top, values in zip(row["top_ids"].tolist(), clamped, strict=True):
        assert len({*top}) == k
        assert values[top].tolist() == sorted(values.tolist())[::-1][:k]
    ids, logprobs = row["prompt_top_ids"], row["prompt_top_logprobs"]
    assert_top(ids[1:], logprobs[1:], [values for values, _ in prompt], k)


def test_columns_of_top_logprobs_are_as_long_as_the_responses():
    values = -np.arange(WORDS, dtype=np.float32)
    samples = [
        Of(token_ids=[0] * n, logprobs=[position_of(values, 0, 3)] * n, finish_reason="stop")
        for n in (2, 0, 1)
    ]
    request = Of(prompt_token_ids=[1], prompt_logprobs=None, outputs=samples)
    rows = vllm.rows_of([request], top=3)
    batch = decode(encode_rows(rows, same_length=["response_ids", "top_ids", "top_logprobs"]))
    assert [row.tolist() for row in batch["top_ids"].unbind()] == [[[0, 1, 2]] * 2, [], [[0, 1, 2]]]


SAMPLE, CHOICE = (
    "vllm.rows_of(outputs)[0].outputs[0]",
    "vllm.rows_of_replies(replies)[0].choices[0]",
)
TWO = {7: Of(logprob=-9.0, rank=5), 8: Of(logprob=-1.0, rank=1), 9: Of(logprob=-2.0, rank=2)}
NO_RANKS = {7: Of(logprob=-1.0, rank=None)}


def of_objects(positions, **options):
    sample = Of(token_ids=[7] * len(positions or [0]), logprobs=positions, finish_reason="stop")
    output = Of(prompt_token_ids=[7], prompt_logprobs=None, outputs=[sample])
    return lambda: vllm.rows_of([output], **options)


def of_content(*entries, **options):
    listed = [{"token": f"token_id:{token}", "logprob": value} for token, value in entries]
    content = [{"token": "token_id:7", "logprob": -9.0, "top_logprobs": listed}]
    choice = {"token_ids": [7], "logprobs": {"content": content}}
    return lambda: vllm.rows_of_replies({"choices": [choice]}, **options)


REFUSED: list[tuple[Any, str, str]] = [
    (of_objects([TWO], top=3), f"{SAMPLE}.logprobs[0]", "of ranks 1 to 3, found 2 of them"),
    (of_objects([TWO, NO_RANKS], top=1), f"{SAMPLE}.logprobs[1]", "found 0 of them; ask vLLM"),
    (of_objects(None, top=2), f"{SAMPLE}.logprobs", r"found none; .*SamplingParams\(logprobs=2\)"),
    (
        *(of_objects([TWO], prompt_top=2), "vllm.rows_of(outputs)[0].prompt_logprobs"),
        r"found none; ask vLLM for SamplingParams\(prompt_logprobs=2\)",
    ),
    (
        *(of_content((7, -9.0), (8, -1.0), top=2), f"{CHOICE}.logprobs.content[0].top_logprobs"),
        "the sampled token and 2 likely ones, found 2 in all; ask vLLM for logprobs=3",
    ),
    (
        of_content((7, -9.0), (7, -1.0), (7, -2.0), top=2),
        f"{CHOICE}.logprobs.content[0].top_logprobs",
        "different tokens, found 3 .* upgrade it",
    ),
    (of_content(("x", -9.0), (8, -1.0), top=1), CHOICE, "a choice of vLLM's"),
    (of_content((7, "x"), (8, -1.0), top=1), f"{CHOICE}.logprobs.content[0]", "expected a logprob"),
    *(
        (of_objects([], **{name: value}), f"vllm.rows_of({name})", "1 to")
        for name in ("top", "prompt_top")
        for value in (0, -1, 2**40)
    ),
]


@pytest.mark.parametrize(("call", "path", "detail"), REFUSED)
def test_fewer_tokens_than_were_asked_for_are_refused_and_named(call, path, detail):
    with pytest.raises((ArgumentError, ArgumentTypeError)) as raised:
        call()
    assert raised.value.path.startswith(path)
    assert re.search(detail, raised.value.detail)
