"""`rows_of`, `rows_of_replies`: outputs of vLLM, and its replies over HTTP, as rows.

Neither imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, index, itemgetter
from typing import Any

import numpy.typing as npt

from jagcodec._arguments import items_of, iterator_of, whole_number
from jagcodec._compiling import untraced
from jagcodec.errors import ArgumentError, brief
from jagcodec.integrations._base64_arrays import MAX_BYTES, array_of_npy, decoded_base64
from jagcodec.integrations._engine_rows import Row, check_count, logprob, reading_output, same_keys
from jagcodec.integrations._expert_ids import KnownIds, known_ids


@untraced
def rows_of(outputs: Iterable[Any]) -> list[dict[str, Any]]:
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

    Returns:
        A dict per `CompletionOutput`, in order. `prompt_ids` and `response_ids` are lists of ints,
        `logprobs` (of the sampled tokens) and `prompt_logprobs` (the first one is 0.0) lists of
        floats, `finish_reason` is a string, and `routed_experts` vLLM's own array (tokens, layers,
        top k). A key that vLLM returned for no sample is in no row. Lists belong to their row.

    Raises:
        ArgumentError: Only some samples have a key, an output is not a `RequestOutput`, or it has
            no logprob of a token. The error names the first such sample.
    """
    rows: dict[str, Row] = {}
    where = "vllm.rows_of(outputs)"
    with reading_output(where, "a list of vLLM's RequestOutputs"):
        outputs = list(iterator_of(outputs))
    for i, output in enumerate(outputs):
        with reading_output(f"{where}[{i}]", "a RequestOutput of vLLM"):
            rows |= _samples_of(output, f"{where}[{i}]")
    return same_keys(rows)


def _samples_of(output: Any, path: str) -> dict[str, Row]:
    """The row of each sample of an output, by the path of the sample."""
    rows: dict[str, Row] = {}
    prompt, logprobs = output.prompt_token_ids, None
    if prompt is not None:
        prompt = [*map(index, prompt)]
        at = f"{path}.prompt_logprobs"
        logprobs = _logprobs_of_positions(output.prompt_logprobs, prompt, at, first=0.0)
    for j, sample in enumerate(output.outputs):
        here = f"{path}.outputs[{j}]"
        with reading_output(here, "a CompletionOutput of vLLM"):
            ids = [*map(index, sample.token_ids)]
            rows[here] = {
                "prompt_ids": prompt,
                "response_ids": ids,
                "logprobs": _logprobs_of_positions(sample.logprobs, ids, f"{here}.logprobs"),
                "finish_reason": sample.finish_reason,
                "prompt_logprobs": logprobs,
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
    found = []
    for at, (token, position) in enumerate(zip(ids, positions, strict=True)):
        if at == 0 and first is not None and not position:
            found.append(first)
            continue
        if key(token) not in (position or ()):
            those = "None" if position is None else f"those of {brief(list(position))}"
            detail = f"expected the logprob of token {token}, found {those}"
            raise ArgumentError("bad_shape", f"{path}[{at}]", detail)
        found.append(logprob(value(position[key(token)]), f"{path}[{at}]"))
    return found


# --- replies over HTTP -------------------------------------------------------------------------


@untraced
def rows_of_replies(
    replies: Mapping[str, Any] | Sequence[Any],
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    experts: int | None = None,
    pad: int | None = None,
    max_bytes: int = MAX_BYTES,
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

    Returns:
        A dict per choice, in order, with the keys of `rows_of`. `routed_experts` is an array
        (tokens, layers, top k) with memory of its own, read-only unless `experts` changes its
        dtype; it has no row for the last token, which was not forwarded. vLLM sends -9999.0 for
        smaller logprobs, and for one that it lacks.

    Raises:
        ArgumentError: Only some samples have a key, a reply is not one of this endpoint, the
            logprobs or expert ids are not those of its tokens, or an id is not that of an expert.
            The error names the first sample.
        ArgumentTypeError: `replies` or `prompts` is not a list.
    """
    where = "vllm.rows_of_replies"
    known = known_ids(experts, pad, where)
    most = whole_number(max_bytes, 0, f"{where}(max_bytes)")
    if isinstance(replies, Mapping):
        replies = (replies,)
    listed = items_of(replies, f"{where}(replies)", "a list of replies of vLLM")
    asked: list[Any] = [None] * len(listed)
    if prompts is not None:
        asked = items_of(prompts, f"{where}(prompts)", "a list of token ids for each reply")
        check_count(len(asked), len(listed), f"{where}(prompts)", "replies")
    rows: dict[str, Row] = {}
    for i, (reply, ids) in enumerate(zip(listed, asked, strict=True)):
        path = f"{where}(replies)[{i}]"
        prompt = None
        if prompts is not None:
            with reading_output(f"{where}(prompts)[{i}]", "a list of token ids"):
                prompt = [*map(index, iterator_of(ids))]
        with reading_output(path, "a reply of vLLM's /inference/v1/generate"):
            rows |= _choices_of(reply, prompt, known, most, path)
    return same_keys(rows)


def _choices_of(
    reply: Any, prompt: list[int] | None, known: KnownIds | None, most: int, path: str
) -> dict[str, Row]:
    """The row of each choice of a reply, by the path of the choice."""
    rows: dict[str, Row] = {}
    positions, at = reply.get("prompt_logprobs"), f"{path}.prompt_logprobs"
    if positions is not None and prompt is None:
        detail = "expected the token ids of the prompts, found none; pass prompts="
        raise ArgumentError("bad_option", at, f"{detail}, or do not ask for prompt_logprobs")
    logprobs = _logprobs_of_positions(
        positions, prompt or [], at, first=0.0, key=str, value=itemgetter("logprob")
    )
    for j, choice in enumerate(iterator_of(reply["choices"])):
        here = f"{path}.choices[{j}]"
        with reading_output(here, "a choice of vLLM's /inference/v1/generate"):
            ids = [*map(index, choice["token_ids"])]
            rows[here] = {
                "prompt_ids": prompt,
                "response_ids": ids,
                "logprobs": _logprobs_of_content(choice.get("logprobs"), ids, f"{here}.logprobs"),
                "finish_reason": choice.get("finish_reason"),
                "prompt_logprobs": logprobs,
                "routed_experts": _experts_of_choice(
                    choice, None if prompt is None else len(prompt) + len(ids), known, most, here
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
            found = f"expected 'token_id:{token}' like token_ids, found {brief(one['token'])}"
            raise ArgumentError("row_mismatch", f"{path}.content[{at}]", found)
    return [logprob(one["logprob"], f"{path}.content[{at}]") for at, one in enumerate(content)]


def _experts_of_choice(
    choice: Any, tokens: int | None, known: KnownIds | None, most: int, path: str
) -> npt.NDArray[Any] | None:
    """The expert ids of all tokens but the last; `tokens` is None if the prompt is not known."""
    text, path = choice.get("routed_experts"), f"{path}.routed_experts"
    if text is None:
        return None
    experts = array_of_npy(decoded_base64(text, most, path), path)
    if experts.ndim != 3 or experts.dtype.kind not in "iu":
        found = f"found {experts.dtype} of shape {brief(experts.shape)}"
        detail = f"expected integers of shape (tokens, layers, top k), {found}"
        raise ArgumentError("bad_shape", path, detail)
    if tokens is not None and len(experts) != max(tokens - 1, 0):
        detail = f"expected {max(tokens - 1, 0)} tokens, all of prompt and response but the last,"
        remedy = "is this the prompt of this reply?"
        raise ArgumentError("bad_length", path, f"{detail} found {len(experts)}; {remedy}")
    return experts if known is None else known.in_smallest(experts, path)
