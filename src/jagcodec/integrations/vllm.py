"""`rows_of`, `rows_of_replies`: outputs of vLLM, and its replies over HTTP, as rows.

Neither imports vLLM. First come the outputs of `LLM.generate`, then the most likely tokens, which
both functions read, and last the replies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, index, itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jagcodec._arguments import items_of, iterator_of, require_int
from jagcodec._compiling import untraced
from jagcodec.errors import ArgumentError, brief
from jagcodec.integrations._engine_arrays import (
    MAX_BYTES,
    ExpertIds,
    array_of_npy,
    decoded_base64,
    usable_expert_ids,
)
from jagcodec.integrations._engine_rows import Row, check_count, logprob, reading_output, same_keys
from jagcodec.memory.arrays import AnyArray

_LARGEST_TOP = 1 << 20
"""The largest `top`: more tokens than any vocabulary has."""


@untraced
def rows_of(
    outputs: Iterable[Any], *, top: int | None = None, prompt_top: int | None = None
) -> list[dict[str, Any]]:
    """One row per sample that `LLM.generate` returns.

    Example:
        >>> from types import SimpleNamespace as Of  # in place of vLLM's own classes
        >>> from jagcodec import encode_rows, materialize
        >>> from jagcodec.integrations.vllm import rows_of
        >>> sampled = [{7: Of(logprob=-0.5), 9: Of(logprob=-0.25)}, {8: Of(logprob=-0.125)}]
        >>> samples = [
        ...     Of(token_ids=[7, 8], logprobs=sampled, finish_reason="stop"),
        ...     Of(token_ids=[8], logprobs=sampled[1:], finish_reason="stop"),
        ... ]
        >>> outputs = [Of(prompt_token_ids=[1, 2, 3], prompt_logprobs=None, outputs=samples)]
        >>> rows = rows_of(outputs)
        >>> rows[0]["prompt_ids"], rows[0]["response_ids"], rows[0]["logprobs"]
        ([1, 2, 3], [7, 8], [-0.5, -0.125])
        >>> frames = encode_rows(rows, same_length=["response_ids", "logprobs"])
        >>> materialize(frames)["logprobs"].tolist()
        [[-0.5, -0.125], [-0.125, 0.0]]

    Args:
        outputs: A list of finished `RequestOutput`s of vLLM 0.33.0.
        top: k, for the k most likely tokens of each position of the response, of which vLLM must
            have returned as many: ``SamplingParams(logprobs=k)``. None: rows have none.
        prompt_top: The same of the prompt: ``SamplingParams(prompt_logprobs=k)``.

    Returns:
        A dict per `CompletionOutput`, in order. A key that vLLM returned for no sample is in no
        row. All lists, and the arrays of likely tokens, belong to their row. The keys are:

        * `prompt_ids`, `response_ids`: lists of ints.
        * `logprobs`, of the sampled tokens, and `prompt_logprobs`, of which the first is 0.0: lists
          of floats.
        * `finish_reason`: a string.
        * `routed_experts`: vLLM's own array (tokens, layers, top k).
        * With `top`, `top_ids` (int64) and `top_logprobs` (float32): arrays (tokens, k), the most
          likely token first.
        * With `prompt_top`, `prompt_top_ids` and `prompt_top_logprobs`: the same of the prompt. The
          first token, which was not predicted, has zeros.

        vLLM's dict of a position has the sampled token, then the tokens of ranks 1 to k
        (`append_logprobs_for_next_position` in vllm/logprobs.py): k tokens or k + 1. A row has the
        tokens of ranks 1 to `top`, whichever was sampled.

    Raises:
        ArgumentError: Only some samples have a key, an output is not a `RequestOutput`, it has no
            logprob of a token, or fewer than `top` likely tokens. The error names the first such
            sample.
    """
    rows: dict[str, Row] = {}
    where = "vllm.rows_of(outputs)"
    likely_counts = _usable_likely_counts(top, prompt_top, "vllm.rows_of")
    with reading_output(where, "a list of vLLM's RequestOutputs"):
        outputs = list(iterator_of(outputs))
    for i, output in enumerate(outputs):
        with reading_output(f"{where}[{i}]", "a RequestOutput of vLLM"):
            rows |= _rows_of_output(output, likely_counts, f"{where}[{i}]")
    return same_keys(rows)


def _rows_of_output(output: Any, likely_counts: _LikelyCounts, path: str) -> dict[str, Row]:
    """The row of each sample of an output, by the path of the sample."""
    rows: dict[str, Row] = {}
    prompt, prompt_logprobs = output.prompt_token_ids, None
    prompt_path = f"{path}.prompt_logprobs"
    if prompt is not None:
        prompt = [*map(index, prompt)]
        prompt_logprobs = _logprobs_of_positions(
            output.prompt_logprobs, prompt, prompt_path, first=0.0
        )
    prompt_top = _likely_of_prompt(
        output.prompt_logprobs, likely_counts.prompt, prompt_path, _ranked_objects
    )
    for j, sample in enumerate(output.outputs):
        sample_path = f"{path}.outputs[{j}]"
        logprobs_path = f"{sample_path}.logprobs"
        with reading_output(sample_path, "a CompletionOutput of vLLM"):
            ids = [*map(index, sample.token_ids)]
            rows[sample_path] = {
                "prompt_ids": prompt,
                "response_ids": ids,
                "logprobs": _logprobs_of_positions(sample.logprobs, ids, logprobs_path),
                "finish_reason": sample.finish_reason,
                "prompt_logprobs": prompt_logprobs,
                **_likely_columns(
                    "", _likely_of_sample(sample.logprobs, likely_counts.response, logprobs_path)
                ),
                **_likely_columns("prompt_", prompt_top),
                # Older versions lack it.
                "routed_experts": getattr(sample, "routed_experts", None),
            }
    return rows


def _logprobs_of_positions(
    positions: Any,
    ids: list[int],
    path: str,
    first: float | None = None,
    key: Callable[[int], Any] = index,
    value: Callable[[Any], Any] = attrgetter("logprob"),
) -> list[float] | None:
    """The logprob of each token in its dict of tokens; `first` if the first dict is empty."""
    if positions is None:
        return None
    check_count(len(positions), len(ids), path, "token ids")
    logprobs = []
    for at, (token, position) in enumerate(zip(ids, positions, strict=True)):
        if at == 0 and first is not None and not position:
            logprobs.append(first)
            continue
        if key(token) not in (position or ()):
            others = "None" if position is None else f"those of {brief(list(position))}"
            detail = f"expected the logprob of token {token}, found {others}"
            raise ArgumentError("bad_shape", f"{path}[{at}]", detail)
        logprobs.append(logprob(value(position[key(token)]), f"{path}[{at}]"))
    return logprobs


# --- the most likely tokens --------------------------------------------------------------------


class _LikelyCounts(NamedTuple):
    """How many likely tokens a caller asks for at each position; None if it asks for none."""

    response: int | None
    prompt: int | None


class _LikelyTokens(NamedTuple):
    """The most likely tokens of each position of a response or of a prompt."""

    ids: AnyArray  # (tokens, k) int64
    logprobs: AnyArray  # (tokens, k) float32


_Ranked: TypeAlias = dict[Any, tuple[int, Any]]
"""The tokens of one position: rank to the token and its logprob."""


def _usable_likely_counts(top: int | None, prompt_top: int | None, where: str) -> _LikelyCounts:
    """The options `top` and `prompt_top`, checked."""
    counts = []
    for name, option in (("top", top), ("prompt_top", prompt_top)):
        path, expected = f"{where}({name})", f"1 to {_LARGEST_TOP}"
        count = None if option is None else require_int(option, 1, path, expected)
        if count is not None and count > _LARGEST_TOP:
            raise ArgumentError("bad_option", path, f"expected {expected}, found {brief(option)}")
        counts.append(count)
    return _LikelyCounts(*counts)


def _likely_columns(prefix: str, top: _LikelyTokens | None) -> Row:
    """The columns of the most likely tokens in a row, which are copies."""
    if top is None:
        return {}
    return {f"{prefix}top_ids": top.ids.copy(), f"{prefix}top_logprobs": top.logprobs.copy()}


def _likely_of_sample(positions: Any, k: int | None, path: str) -> _LikelyTokens | None:
    """The k most likely tokens of each position of a response."""
    if k is None:
        return None
    positions = _numbered_positions(positions, f"logprobs={k}", path)
    rows = [_likely_of_ranks(_ranked_objects(x), k, path, i) for i, x in positions]
    return _likely_arrays(rows, k)


def _likely_of_prompt(
    positions: Any, k: int | None, path: str, ranked: Callable[[Any], _Ranked]
) -> _LikelyTokens | None:
    """The k most likely tokens of each position of a prompt, of which the first has zeros."""
    if k is None:
        return None
    positions = _numbered_positions(positions, f"prompt_logprobs={k}", path)
    rows = [
        [(0, 0.0)] * k if i == 0 and not x else _likely_of_ranks(ranked(x), k, path, i)
        for i, x in positions
    ]
    return _likely_arrays(rows, k)


def _numbered_positions(positions: Any, option: str, path: str) -> Iterable[tuple[int, Any]]:
    """The positions with their numbers; an error if vLLM returned none."""
    if positions is None:
        detail = f"expected logprobs, found none; ask vLLM for SamplingParams({option})"
        raise ArgumentError("bad_option", path, detail)
    return enumerate(positions)


def _ranked_objects(position: Any) -> _Ranked:
    """The tokens of a position that `LLM.generate` returned."""
    # A later token replaces an earlier one of its rank. The sampled token is the first, and ties
    # may give it the rank of another token, which then counts.
    ranked: _Ranked = {}
    for token, one in (position or {}).items():
        token_and_logprob = index(token), one.logprob
        ranked[one.rank] = token_and_logprob
    return ranked


def _ranked_maps(position: Any) -> _Ranked:
    """The tokens of a position in JSON, as `_ranked_objects` returns them."""
    ranked: _Ranked = {}
    for token, one in (position or {}).items():
        token_and_logprob = int(token), one["logprob"]
        ranked[one.get("rank")] = token_and_logprob
    return ranked


def _likely_of_ranks(ranked: _Ranked, k: int, path: str, at: int) -> list[tuple[int, float]]:
    """The tokens of ranks 1 to k, and their logprobs."""
    likely = [ranked[rank] for rank in range(1, k + 1) if rank in ranked]
    if len(likely) < k:
        detail = f"expected the tokens of ranks 1 to {k}, found {len(likely)} of them"
        remedy = "ask vLLM for as many logprobs, or pass fewer"
        raise ArgumentError("bad_shape", f"{path}[{at}]", f"{detail}; {remedy}")
    return [(token, logprob(value, f"{path}[{at}]")) for token, value in likely]


def _likely_arrays(rows: list[list[tuple[int, float]]], k: int) -> _LikelyTokens:
    """The tokens and the logprobs of each position as arrays."""
    ids = np.array([[token for token, _ in row] for row in rows], np.int64)
    values = np.array([[value for _, value in row] for row in rows], np.float32)
    return _LikelyTokens(ids.reshape(len(rows), k), values.reshape(len(rows), k))


# --- replies over HTTP -------------------------------------------------------------------------


@untraced
def rows_of_replies(
    replies: Mapping[str, Any] | Sequence[Any],
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    experts: int | None = None,
    pad: int | None = None,
    max_bytes: int = MAX_BYTES,
    top: int | None = None,
    prompt_top: int | None = None,
) -> list[dict[str, Any]]:
    """One row per sample that the endpoint ``/inference/v1/generate`` returns.

    Example:
        >>> import json
        >>> from jagcodec import encode_rows
        >>> from jagcodec.integrations.vllm import rows_of_replies
        >>> body = '''{"request_id": "a", "choices": [{"index": 0, "finish_reason": "stop",
        ...     "token_ids": [7, 8], "logprobs": {"content": [
        ...     {"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:8", "logprob": -2}]}
        ... }]}'''
        >>> rows = rows_of_replies(json.loads(body), prompts=[[1, 2, 3]])
        >>> rows[0]["prompt_ids"], rows[0]["response_ids"], rows[0]["logprobs"]
        ([1, 2, 3], [7, 8], [-0.5, -2.0])
        >>> frames = encode_rows(rows, same_length=["response_ids", "logprobs"])

    Args:
        replies: A reply as `json.loads` returned it, or a list of them. Those of streams are not
            read.
        prompts: The `token_ids` of each request, in the order of the replies, which do not have
            them. None: rows have no `prompt_ids`.
        experts: How many experts the model has: expert ids are checked, and get the smallest dtype
            that holds them, as from `smallest_ids`. None: they have the dtype that vLLM sent.
        pad: The id that you will pass in `pad_value_dict`, as for `smallest_ids`.
        max_bytes: The most bytes that the expert ids of a sample may have.
        top: As for `rows_of`, but ask vLLM for one more, ``"logprobs": k + 1``.
        prompt_top: As for `rows_of`.

    Returns:
        A dict per choice, in order, with the keys of `rows_of`. `routed_experts` is an array
        (tokens, layers, top k) with memory of its own, read-only unless `experts` changes its
        dtype; it has no row for the last token, which was not forwarded. vLLM sends -9999.0 for
        smaller logprobs, and for one that it lacks.

        For ``"logprobs": n``, vLLM lists the sampled token and then the tokens of ranks 1 to n, and
        sends the first n of this list, without ranks (`_create_tokens_logprobs` in
        vllm/entrypoints/serve/disagg/serving.py). So one of the top n is missing if the sampled
        token is not among them, and `top` must be smaller than n.

    Raises:
        ArgumentError: Only some samples have a key, a reply is not one of this endpoint, the
            logprobs or expert ids are not those of its tokens, an id is not that of an expert, or
            there are too few likely tokens, or each has the name of the sampled one, as older
            versions of vLLM send them. The error names the first sample.
        ArgumentTypeError: `replies` or `prompts` is not a list.
    """
    where = "vllm.rows_of_replies"
    expert_ids = usable_expert_ids(experts, pad, where)
    max_bytes = require_int(max_bytes, 0, f"{where}(max_bytes)")
    likely_counts = _usable_likely_counts(top, prompt_top, where)
    if isinstance(replies, Mapping):
        replies = (replies,)
    reply_list = items_of(replies, f"{where}(replies)", "a list of replies of vLLM")
    prompt_lists: list[Any] = [None] * len(reply_list)
    if prompts is not None:
        prompt_lists = items_of(prompts, f"{where}(prompts)", "a list of token ids for each reply")
        check_count(len(prompt_lists), len(reply_list), f"{where}(prompts)", "replies")
    rows: dict[str, Row] = {}
    for i, (reply, ids) in enumerate(zip(reply_list, prompt_lists, strict=True)):
        path = f"{where}(replies)[{i}]"
        prompt = None
        if prompts is not None:
            with reading_output(f"{where}(prompts)[{i}]", "a list of token ids"):
                prompt = [*map(index, iterator_of(ids))]
        with reading_output(path, "a reply of vLLM's /inference/v1/generate"):
            rows |= _rows_of_reply(reply, prompt, expert_ids, max_bytes, likely_counts, path)
    return same_keys(rows)


def _rows_of_reply(
    reply: Any,
    prompt: list[int] | None,
    expert_ids: ExpertIds | None,
    max_bytes: int,
    likely_counts: _LikelyCounts,
    path: str,
) -> dict[str, Row]:
    """The row of each choice of a reply, by the path of the choice."""
    rows: dict[str, Row] = {}
    positions, prompt_path = reply.get("prompt_logprobs"), f"{path}.prompt_logprobs"
    if positions is not None and prompt is None:
        detail = "expected the token ids of the prompts, found none; pass prompts=, or do not "
        raise ArgumentError("bad_option", prompt_path, f"{detail}ask for prompt_logprobs")
    prompt_logprobs = _logprobs_of_positions(
        positions, prompt or [], prompt_path, first=0.0, key=str, value=itemgetter("logprob")
    )
    prompt_top = _likely_of_prompt(positions, likely_counts.prompt, prompt_path, _ranked_maps)
    for j, choice in enumerate(iterator_of(reply["choices"])):
        choice_path = f"{path}.choices[{j}]"
        logprobs_path = f"{choice_path}.logprobs"
        with reading_output(choice_path, "a choice of vLLM's /inference/v1/generate"):
            ids = [*map(index, choice["token_ids"])]
            tokens = None if prompt is None else len(prompt) + len(ids)
            logprobs = choice.get("logprobs")
            rows[choice_path] = {
                "prompt_ids": prompt,
                "response_ids": ids,
                "logprobs": _logprobs_of_content(logprobs, ids, logprobs_path),
                "finish_reason": choice.get("finish_reason"),
                "prompt_logprobs": prompt_logprobs,
                **_likely_columns(
                    "", _likely_of_content(logprobs, likely_counts.response, logprobs_path)
                ),
                **_likely_columns("prompt_", prompt_top),
                "routed_experts": _experts_of_choice(
                    choice, tokens, expert_ids, max_bytes, choice_path
                ),
            }
    return rows


def _logprobs_of_content(logprobs: Any, ids: list[int], path: str) -> list[float] | None:
    """The logprobs of dicts of a token and its logprob, one for each of these ids."""
    if logprobs is None:
        return None
    content = logprobs["content"]
    check_count(len(content), len(ids), path, "token_ids")
    for at, (token, one) in enumerate(zip(ids, content, strict=True)):
        if one["token"] != f"token_id:{token}":
            detail = f"expected 'token_id:{token}' like token_ids, found {brief(one['token'])}"
            raise ArgumentError("row_mismatch", f"{path}.content[{at}]", detail)
    return [logprob(one["logprob"], f"{path}.content[{at}]") for at, one in enumerate(content)]


def _likely_of_content(logprobs: Any, k: int | None, path: str) -> _LikelyTokens | None:
    """The k most likely tokens of each position of a choice, which come without their ranks."""
    if k is None:
        return None
    positions = None if logprobs is None else logprobs["content"]
    content = _numbered_positions(positions, f"logprobs={k + 1}", path)
    rows = [_largest(x["top_logprobs"], k, f"{path}.content[{i}].top_logprobs") for i, x in content]
    return _likely_arrays(rows, k)


def _largest(entries: Sequence[Any], k: int, path: str) -> list[tuple[int, float]]:
    """The k tokens of the largest logprobs, of which the first is the sampled token."""
    if len(entries) <= k:
        detail = f"expected the sampled token and {k} likely ones, found {len(entries)} in all"
        raise ArgumentError("bad_shape", path, f"{detail}; ask vLLM for logprobs={k + 1}")
    tokens = [int(one["token"].removeprefix("token_id:")) for one in entries]
    if len({*tokens}) < len(tokens):
        detail = f"expected different tokens, found {len(tokens)} of which some are one"
        remedy = "this version of vLLM gives all of them the name of the sampled one; upgrade it"
        raise ArgumentError("bad_value", path, f"{detail}; {remedy}")
    values = [logprob(one["logprob"], path) for one in entries]
    # The sampled token comes after others with the same logprob: it may be outside the top k.
    order = sorted(range(len(entries)), key=lambda i: (-values[i], i == 0))
    return [(tokens[i], values[i]) for i in order[:k]]


def _experts_of_choice(
    choice: Any, tokens: int | None, expert_ids: ExpertIds | None, max_bytes: int, path: str
) -> AnyArray | None:
    """The expert ids of all tokens but the last; `tokens` is None if the prompt is not known."""
    text, path = choice.get("routed_experts"), f"{path}.routed_experts"
    if text is None:
        return None
    experts = array_of_npy(decoded_base64(text, max_bytes, path), path)
    if experts.ndim != 3 or experts.dtype.kind not in "iu":
        detail = f"expected integers of shape (tokens, layers, top k), found {experts.dtype} "
        detail += f"of shape {brief(experts.shape)}"
        raise ArgumentError("bad_shape", path, detail)
    if tokens is not None and len(experts) != max(tokens - 1, 0):
        detail = f"expected {max(tokens - 1, 0)} tokens, all of prompt and response but the last,"
        remedy = "is this the prompt of this reply?"
        raise ArgumentError("bad_length", path, f"{detail} found {len(experts)}; {remedy}")
    return experts if expert_ids is None else expert_ids.in_smallest(experts, path)
