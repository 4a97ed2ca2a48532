"""`rows_of`: outputs of SGLang as rows; imports no SGLang."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jagcodec._arguments import int_or_none, items_of, require_int
from jagcodec._compiling import untraced
from jagcodec.errors import ArgumentError, brief, describe
from jagcodec.integrations._engine_arrays import (
    MAX_BYTES,
    ExpertIds,
    decoded_base64,
    dtype_named,
    flat_array,
    usable_expert_ids,
)
from jagcodec.integrations._engine_rows import Row, check_count, logprob, reading_output, same_keys


@untraced
def rows_of(
    responses: Mapping[str, Any] | Sequence[Any],
    *,
    layers: int | None = None,
    top_k: int | None = None,
    start_len: int | Sequence[int] | None = None,
    earlier: Sequence[npt.NDArray[Any] | None] | None = None,
    experts: int | None = None,
    pad: int | None = None,
    max_bytes: int = MAX_BYTES,
) -> list[dict[str, Any]]:
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
        layers: How many layers have experts, and so expert ids. SGLang does not send the shape.
        top_k: How many experts each token has in a layer. Pass both or neither.
        start_len: The `routed_experts_start_len` of your request, or one for each response: expert
            ids of the tokens before it were not sent. None: what `meta_info` says, otherwise 0.
        earlier: For each response, the expert ids (tokens, layers, top k) of at least the first
            `start_len` tokens, such as those of the turn before; None if its start is 0. If you
            pass `start_len` alone, a row has the ids from there on, which `RowBuilder.append`
            adds to those before.
        experts: How many experts the model has: expert ids are checked, and get the smallest dtype
            that holds them, as from `smallest_ids`. None: they have the dtype that SGLang sent.
        pad: The id that you will pass in `pad_value_dict`, as for `smallest_ids`.
        max_bytes: The most bytes that the expert ids of a response may have.

    Returns:
        A dict per response, in order. A key that SGLang returned for no sample is in no row. Lists
        belong to their row. The keys are:

        * `prompt_ids`: a list of ints. They are the `prompt_token_ids`, which you get for
          ``return_prompt_token_ids=True``. Without these, they are the tokens of
          `input_token_logprobs`, if these cover the prompt; SGLang sends 0 for those of an image.
        * `response_ids`: a list of ints.
        * `logprobs`: a list of floats, of the sampled tokens; for ``return_logprob=True``.
        * `finish_reason`: the `type` of SGLang's dict.
        * `prompt_logprobs`: a list of floats, of which the first is 0.0; for
          ``logprob_start_len=0``.
        * `routed_experts`: an array (tokens, layers, top k) if you pass `layers` and `top_k`, and
          flat otherwise. It has no row for the last token, which was not forwarded. If you pass
          `earlier` and its start is not 0, it has the beginning of `earlier`, and then the ids that
          SGLang sent. It is read-only if it is just these ids, in the dtype that SGLang sent.

    Raises:
        ArgumentError: Only some samples have a key, a response is not one of ``/generate``, or its
            logprobs or expert ids are not those of its tokens, an id is not that of an expert, or
            `earlier` ends before the expert ids start. The error names the first such sample.
        ArgumentTypeError: `start_len` or `earlier` is not a list.
    """
    where = "sglang.rows_of"
    with reading_output(f"{where}(responses)", "responses of SGLang's /generate"):
        samples = dict(_each_response(responses, f"{where}(responses)"))
    max_bytes = require_int(max_bytes, 0, f"{where}(max_bytes)")
    shape = _shape_of_token(layers, top_k, where)
    expert_ids = usable_expert_ids(experts, pad, where)
    starts = _starts_of(start_len, len(samples), f"{where}(start_len)")
    only_from_start = start_len is not None and earlier is None
    earlier_ids: list[Any] = [None] * len(samples)
    if earlier is not None:
        earlier_ids = items_of(earlier, f"{where}(earlier)", "an array or None for each response")
        check_count(len(earlier_ids), len(samples), f"{where}(earlier)", "responses")
    rows: dict[str, Row] = {}
    for i, (path, response) in enumerate(samples.items()):
        options = _ExpertOptions(
            shape=shape,
            expert_ids=expert_ids,
            start=starts[i],
            only_from_start=only_from_start,
            earlier_ids=earlier_ids[i],
            path_of_earlier=f"{where}(earlier)[{i}]",
            max_bytes=max_bytes,
        )
        with reading_output(path, "a response of SGLang's /generate"):
            rows[path] = _row_of_response(response, options, path)
    return same_keys(rows)


class _ExpertOptions(NamedTuple):
    """The options of a caller for the expert ids of one response."""

    shape: tuple[int, int] | None  # layers and top k
    expert_ids: ExpertIds | None
    start: int | None  # the token whose ids come first; None if the response names it
    only_from_start: bool  # whether the row has no ids of tokens before the start
    earlier_ids: Any  # of tokens before the start; None if the caller passed none
    path_of_earlier: str
    max_bytes: int


def _shape_of_token(layers: Any, top_k: Any, where: str) -> tuple[int, int] | None:
    """The shape of the expert ids of a token, checked; None if the caller passed none."""
    if layers is None and top_k is None:
        return None
    both = "1 or more, for layers and for top_k"
    return (
        require_int(layers, 1, f"{where}(layers)", both),
        require_int(top_k, 1, f"{where}(top_k)", both),
    )


def _starts_of(start_len: Any, count: int, path: str) -> list[int | None]:
    """The start of the expert ids of each response; None if the response names it."""
    if start_len is None:
        return [None] * count
    if int_or_none(start_len) is not None:
        return [require_int(start_len, 0, path)] * count
    starts = items_of(start_len, path, "an integer, or a list of one for each response")
    check_count(len(starts), count, path, "responses")
    return [require_int(start, 0, f"{path}[{i}]") for i, start in enumerate(starts)]


def _each_response(responses: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Each response in lists of any depth, with its path."""
    if isinstance(responses, (list, tuple)):
        for i, response in enumerate(responses):
            yield from _each_response(response, f"{path}[{i}]")
    else:
        yield path, responses


def _row_of_response(response: Any, options: _ExpertOptions, path: str) -> Row:
    """The row of one response."""
    meta, ids = response["meta_info"], [*map(index, response["output_ids"])]
    finish = meta["finish_reason"]
    prompt, prompt_logprobs = _prompt_of_response(response, meta, f"{path}.input_token_logprobs")
    prompt_tokens = meta.get("prompt_tokens") if prompt is None else len(prompt)
    tokens = None if prompt_tokens is None else index(prompt_tokens) + len(ids)
    return {
        "prompt_ids": prompt,
        "response_ids": ids,
        "logprobs": _logprobs_of_triples(meta.get("output_token_logprobs"), ids, path),
        "finish_reason": None if finish is None else finish["type"],
        "prompt_logprobs": prompt_logprobs,
        "routed_experts": _experts_of_response(meta, tokens, options, f"{path}.routed_experts"),
    }


def _experts_of_response(
    meta: Any, tokens: int | None, options: _ExpertOptions, path: str
) -> npt.NDArray[Any] | None:
    """The expert ids of all tokens but the last; `tokens` is None if SGLang did not count them."""
    if meta.get("routed_experts") is None:
        return None
    # Versions that send other dtypes than int32 name them.
    dtype = dtype_named(meta.get("routed_experts_dtype", "int32"), f"{path}_dtype")
    flat = flat_array(decoded_base64(meta["routed_experts"], options.max_bytes, path), dtype, path)
    start = options.start
    if start is None:
        start = require_int(meta.get("routed_experts_start_len") or 0, 0, f"{path}_start_len")
    if options.shape is None:
        if start:
            detail = f"expected layers= and top_k= for expert ids that start at token {start}"
            raise ArgumentError("bad_option", path, f"{detail}, found neither")
        return _in_smallest(flat, options, path)
    layers, top_k = options.shape
    count, rest = divmod(len(flat), layers * top_k)
    expected = count if tokens is None else max(tokens - 1 - start, 0)
    if rest or count != expected:
        of_each = f"{layers} layers x {top_k} experts"
        detail = f"expected {expected} tokens x {of_each} = {expected * layers * top_k} ids"
        remedy = "; check layers=, top_k= and start_len="
        raise ArgumentError("bad_length", path, f"{detail}, found {len(flat)}{remedy}")
    ids = _in_smallest(flat.reshape(count, layers, top_k), options, path)
    if start == 0 or options.only_from_start:
        return ids
    return np.concatenate([_ids_before_start(options, start, path), ids])


def _in_smallest(ids: npt.NDArray[Any], options: _ExpertOptions, path: str) -> npt.NDArray[Any]:
    """The ids in the smallest dtype, if the number of experts is known."""
    if options.expert_ids is None:
        return ids
    return options.expert_ids.in_smallest(ids, path)


def _ids_before_start(options: _ExpertOptions, start: int, path: str) -> npt.NDArray[Any]:
    """The expert ids of the tokens before `start`, which the caller passed in `earlier`."""
    earlier = options.earlier_ids
    is_array = isinstance(earlier, np.ndarray) and earlier.ndim > 0
    count = len(earlier) if is_array else 0
    if (is_array or earlier is None) and count < start:
        detail = f"expected expert ids of the first {start} tokens in earlier=, found {count}"
        remedy = "; pass those of the turn before, or start_len= alone for ids from there on"
        raise ArgumentError("bad_length", path, detail + remedy)
    is_integers = is_array and np.can_cast(earlier.dtype, np.int32)
    if not is_integers or earlier.shape[1:] != options.shape:
        detail = f"expected int32 or smaller integers of shape (tokens, *{brief(options.shape)}), "
        detail += "found "
        detail += f"{earlier.dtype} of shape {earlier.shape}" if is_integers else describe(earlier)
        raise ArgumentError("bad_shape", options.path_of_earlier, detail)
    return _in_smallest(earlier[:start], options, options.path_of_earlier)


def _logprobs_of_triples(triples: Any, ids: list[int], path: str) -> list[float] | None:
    """The logprobs of (logprob, token id, text), one for each of these ids."""
    if triples is None:
        return None
    path = f"{path}.output_token_logprobs"
    check_count(len(triples), len(ids), path, "output_ids")
    for at, (_, token, _) in enumerate(triples):
        if token != ids[at]:
            raise _other_token(token, ids[at], "output_ids", f"{path}[{at}]")
    return [logprob(value, f"{path}[{at}]") for at, (value, _, _) in enumerate(triples)]


def _other_token(token: Any, expected: int, like: str, path: str) -> ArgumentError:
    """The error for the logprob of another token than the one that the response has there."""
    detail = f"expected token {expected} like {like}, found {brief(token)}"
    return ArgumentError("row_mismatch", path, detail)


def _prompt_of_response(
    response: Any, meta: Any, path: str
) -> tuple[list[int] | None, list[float] | None]:
    """The ids of the prompt, and their logprobs if SGLang returned one for each of them."""
    prompt, triples = response.get("prompt_token_ids"), meta.get("input_token_logprobs") or ()
    values = [value for value, _, _ in triples]
    count = meta.get("prompt_tokens") if prompt is None else len(prompt)
    if not values or len(values) != count:
        # Older versions return the last token of each prompt, without a logprob.
        if any(value is not None for value in values):
            if count is None:
                expected = "expected `prompt_token_ids` or `prompt_tokens` beside logprobs of the "
                remedy = "prompt, found neither; pass return_prompt_token_ids=True"
                raise ArgumentError("bad_length", path, expected + remedy)
            expected = f"expected the logprobs of all {count} tokens of the prompt, found "
            remedy = f"{len(values)}; pass logprob_start_len=0 for all, or leave it out for none"
            raise ArgumentError("bad_length", path, expected + remedy)
        return None if prompt is None else [*map(index, prompt)], None
    values[0] = 0.0 if values[0] is None else values[0]
    tokens = [token for _, token, _ in triples]
    ids = [index(token) for token in prompt or tokens]
    for at, token in enumerate(tokens):
        # SGLang sends 0 for the tokens of an image, whose ids the tokenizer does not have.
        if token not in (ids[at], 0):
            raise _other_token(token, ids[at], "prompt_token_ids", f"{path}[{at}]")
    return ids, [logprob(value, f"{path}[{at}]") for at, value in enumerate(values)]
