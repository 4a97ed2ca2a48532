"""`rows_of`: outputs of SGLang as rows; imports no SGLang."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import Any

import numpy as np

from jagcodec.errors import ArgumentError, brief
from jagcodec.integrations._engine_rows import Row, check_count, logprob, reading_output, same_keys


def rows_of(responses: Mapping[str, Any] | Sequence[Any]) -> list[dict[str, Any]]:
    """One row per sample that `Engine.generate` or the endpoint ``/generate`` returns.

    Example:
        >>> from jagcodec import encode_rows, materialize
        >>> from jagcodec.integrations.sglang import rows_of
        >>> responses = [
        ...     {
        ...         "output_ids": [7, 8],
        ...         "prompt_token_ids": [1, 2, 3],
        ...         "meta_info": {
        ...             "prompt_tokens": 3,
        ...             "finish_reason": {"type": "stop", "matched": 8},
        ...             "input_token_logprobs": [],
        ...             "output_token_logprobs": [(-0.5, 7, None), (-0.125, 8, None)],
        ...         },
        ...     },
        ... ]
        >>> rows = rows_of(responses)
        >>> rows[0]["response_ids"], rows[0]["logprobs"], rows[0]["finish_reason"]
        ([7, 8], [-0.5, -0.125], 'stop')
        >>> frames = encode_rows(rows, same_length=["response_ids", "logprobs"])
        >>> materialize(frames)["prompt_ids"].tolist()
        [[1, 2, 3]]

    Args:
        responses: A response of SGLang 0.5.23, also as JSON, or lists of them of any depth.

    Returns:
        A dict per response, in order. `prompt_ids` (`prompt_token_ids`, which you get for
        ``return_prompt_token_ids=True``, or the tokens of `input_token_logprobs` if these cover
        the prompt) and `response_ids` are lists of ints. `logprobs` (of the sampled tokens,
        ``return_logprob=True``) and `prompt_logprobs` (``logprob_start_len=0``; the first one is
        0.0) are lists of floats. `finish_reason` is the `type` of SGLang's dict.
        `routed_experts` is an array, flat and read-only: ``reshape(-1, layers, top_k)`` has a row
        per token. A key that SGLang returned for no sample is in no row. Lists belong to their row.

    Raises:
        ArgumentError: Only some samples have a key, a response is not one of ``/generate``, or its
            logprobs are not those of its tokens. The error names the first such sample.
    """
    rows: dict[str, Row] = {}
    for path, response in _each_response(responses, "sglang.rows_of(responses)"):
        with reading_output(path, "a response of SGLang's /generate"):
            rows[path] = _row_of_response(response, path)
    return same_keys(rows)


def _each_response(responses: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(responses, (list, tuple)):
        for i, response in enumerate(responses):
            yield from _each_response(response, f"{path}[{i}]")
    else:
        yield path, responses


def _row_of_response(response: Any, path: str) -> Row:
    meta, ids = response["meta_info"], [*map(index, response["output_ids"])]
    finish, experts = meta["finish_reason"], meta.get("routed_experts")
    prompt, prompt_logprobs = _prompt(response, meta, f"{path}.input_token_logprobs")
    if experts is not None:  # versions that send other dtypes than int32 name them
        dtype = np.dtype(meta.get("routed_experts_dtype", "int32"))
        experts = np.frombuffer(base64.b64decode(experts, validate=True), dtype)
    return {
        "prompt_ids": prompt,
        "response_ids": ids,
        "logprobs": _logprobs_of_triples(meta.get("output_token_logprobs"), ids, path),
        "finish_reason": None if finish is None else finish["type"],
        "prompt_logprobs": prompt_logprobs,
        "routed_experts": experts,
    }


def _logprobs_of_triples(triples: Any, ids: list[int], path: str) -> list[float] | None:
    """The logprobs of (logprob, token id, text), one for each of these ids."""
    if triples is None:
        return None
    path = f"{path}.output_token_logprobs"
    check_count(len(triples), len(ids), path, "output_ids")
    for at, (_, token, _) in enumerate(triples):
        if token != ids[at]:
            found = f"expected token {ids[at]} like output_ids, found {brief(token)}"
            raise ArgumentError("row_mismatch", f"{path}[{at}]", found)
    return [logprob(value, f"{path}[{at}]") for at, (value, _, _) in enumerate(triples)]


def _prompt(response: Any, meta: Any, path: str) -> tuple[list[int] | None, list[float] | None]:
    """The ids of the prompt, and their logprobs if SGLang returned those of all of them."""
    prompt, triples = response.get("prompt_token_ids"), meta.get("input_token_logprobs") or ()
    values = [value for value, _, _ in triples]
    count = meta.get("prompt_tokens") if prompt is None else len(prompt)
    if not values or len(values) != count:
        # Older versions return the last token of each prompt, without a logprob.
        if any(value is not None for value in values):
            expected = f"expected the logprobs of all {count} tokens of the prompt, found "
            remedy = f"{len(values)}; pass logprob_start_len=0 for all, or leave it out for none"
            raise ArgumentError("bad_length", path, expected + remedy)
        return None if prompt is None else [*map(index, prompt)], None
    values[0] = 0.0 if values[0] is None else values[0]
    ids = [index(token) for token in prompt or [token for _, token, _ in triples]]
    return ids, [logprob(value, f"{path}[{at}]") for at, value in enumerate(values)]
