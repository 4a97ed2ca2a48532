"""`rows_of`: outputs of vLLM as rows; imports no vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

from jagcodec._arguments import iterator_of
from jagcodec.errors import ArgumentError, brief
from jagcodec.integrations._engine_rows import Row, check_count, logprob, reading_output, same_keys


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
    positions: Any, ids: list[int], path: str, first: float | None = None
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
        if token not in (position or ()):
            those = "None" if position is None else f"those of {brief(list(position))}"
            detail = f"expected the logprob of token {token}, found {those}"
            raise ArgumentError("bad_shape", f"{path}[{at}]", detail)
        found.append(logprob(position[token].logprob, f"{path}[{at}]"))
    return found
