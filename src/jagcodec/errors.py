"""The one error family: where, what was expected, what was found, and the remedy.

This module imports nothing from the package, so that every other module can raise these errors.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

Reason = Literal[
    # a bad argument to a layout, column or trainer function
    "bad_type",
    "bad_dtype",
    "bad_shape",
    "bad_length",
    "bad_pad",
    "bad_option",
    "row_mismatch",
    "row_too_long",
    "conflict",
    "empty_prompt",
    "no_such_field",
    "no_such_row",
    "new_field",
    # an object that cannot be encoded
    "unsupported_type",
    "too_deep",
    "too_large",
    # a message that cannot be read
    "no_message",
    "foreign",
    "unknown_version",
    "bad_header",
    "unknown_kind",
    "unknown_dtype",
    "bad_record",
    "frame_count",
    "frame_size",
    "out_of_bounds",
    "bad_offsets",
    "bad_sparse",
    "bad_rows",
    "bad_value",
    "bad_checksum",
    "unknown_type",
    "pickle_refused",
    # a message that could not be delivered
    "timed_out",
    "no_peer",
    "peer_failed",
    # a record that does not have the step, or is in use
    "no_such_key",
    "busy",
]
"""The closed set of reason codes: programs branch on these, people read the text."""

REASONS: frozenset[str] = frozenset(get_args(Reason))

LONGEST_PATH, LONGEST_DETAIL = 200, 600
"""Characters of the path and of the detail of an error, at most."""


class JagcodecError(Exception):
    """Base of every error this library raises on purpose.

    Its texts are safe to log, even for bytes of a stranger: control characters are escaped, and of
    more than `LONGEST_PATH` or `LONGEST_DETAIL` characters the middle is left out.

    Example:
        >>> import torch, jagcodec
        >>> try:
        ...     jagcodec.to_nested_by_length(torch.zeros(2, 3), torch.tensor([1, 9]))
        ... except jagcodec.JagcodecError as error:
        ...     print(error.reason)
        bad_length

    Attributes:
        reason: One of `REASONS`; stable, for programs.
        path: A path into a value (``$.extra[3].lock``), a frame, or ``function(argument)``.
        detail: What was expected, what was found and, where there is one, the remedy.
    """

    def __init__(self, reason: Reason, path: str, detail: str) -> None:
        path, detail = shown(path, LONGEST_PATH), shown(detail, LONGEST_DETAIL)
        # The three arguments are Exception.args, so the error survives pickling between processes.
        super().__init__(reason, path, detail)
        self.reason: Reason = reason
        self.path: str = path
        self.detail: str = detail

    def __str__(self) -> str:
        return f"{self.path}: {self.detail}"


def shown(text: str, most: int) -> str:
    """A text that a stranger may have chosen: escaped as `repr` does it, its middle cut out."""
    if len(text) <= most and text.isprintable():
        return text
    # Read only the two ends, however long the text is.
    part = text if len(text) <= 2 * most else text[:most] + text[-most:]
    part = "".join(c if c.isprintable() else repr(c)[1:-1] for c in part)
    if len(part) <= most:
        return part
    tail = most // 3
    return f"{part[: most - tail - 3]}...{part[-tail:]}"


def child_path(path: str, key: object) -> str:
    """`path` extended by a key: ``$.name``, or ``$['odd name']``. A long key is shortened."""
    if type(key) is str and len(key) <= 60 and key.isidentifier():
        return f"{path}.{key}"
    return f"{path}[{brief(key)}]"


def column_name(key: str | tuple[str, ...]) -> str:
    """What an error calls a column. In a nested batch, the key has all names on the way to it."""
    return repr(key if isinstance(key, str) else ".".join(key))


def with_name_in_remedy(error: JagcodecError, name: str) -> JagcodecError:
    """The error, with the name of its column where a remedy has ``dtypes={...: object}``."""
    detail = error.detail.replace("={...: ", f"={{{brief(name)}: ")
    return type(error)(error.reason, error.path, detail)


def brief(value: object) -> str:
    """A value in a few words. Unlike `repr`, this never fails, and is always short."""
    try:
        return _in_words(value)
    except Exception:  # a subclass may raise in `repr` or `len`
        return _type_name(value)


def _in_words(value: object) -> str:
    if isinstance(value, (str, bytes)):
        return repr(value) if len(value) <= 60 else f"{value[:57]!r}..."
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an int of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    plain = (int, str, bool, type(None))
    if type(value) in (list, tuple):
        items: list[object] = list(value)  # type: ignore[call-overload]
        if len(items) <= 8 and all(type(item) in plain for item in items):
            return f"[{', '.join(map(brief, items))}]"
        return f"a {type(value).__name__} of {len(items)}"
    if type(value) is dict:
        return f"a dict of {len(value)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return _type_name(value)


def _type_name(value: object) -> str:
    try:
        return f"{type(value).__name__}"
    except Exception:  # a metaclass may raise
        return "an object"


def describe(value: Any) -> str:
    """What a value is, in a few words; of a tensor its dtype, shape, layout and device."""
    try:
        kind = "nested" if value.is_nested else f"{tuple(value.shape)}"
        return f"a {kind} tensor of {value.dtype} and layout {value.layout} on {value.device}"
    except Exception:  # not a tensor, or one that does not have all of these yet
        return _type_name(value)


class JagcodecWarning(UserWarning):
    """A batch was packed in a way that its producer may not have meant.

    Python shows it once per calling line. ``strict=True`` raises an error for most of these cases.

    Example:
        >>> import warnings, torch, jagcodec
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     column = jagcodec.pack_per_token_field(torch.ones(2, 3), [2, 4])
        >>> caught[0].category.__name__, column.shape
        ('JagcodecWarning', torch.Size([2, 3]))
    """


class ArgumentError(JagcodecError, ValueError):
    """An argument has an invalid value; also a `ValueError`."""


class ArgumentTypeError(JagcodecError, TypeError):
    """An argument has the wrong type or dtype; also a `TypeError`."""


class ArgumentKeyError(JagcodecError, KeyError):
    """A name is not that of a column, or a key is not in a store; also a `KeyError`."""


class ArgumentIndexError(JagcodecError, IndexError):
    """A requested row does not exist; also an `IndexError`."""


class UnsupportedTypeError(JagcodecError, TypeError):
    """`encode` was given an object it cannot encode; `path` names it; also a `TypeError`."""


class WireFormatError(JagcodecError, ValueError):
    """A message cannot be read: truncated, foreign, newer, or inconsistent; also a `ValueError`."""


class TransportError(JagcodecError):
    """A valid message could not be delivered, because a peer is missing or has failed.

    Only `jagcodec.integrations` raises it.
    """


class TransportTimeoutError(TransportError, TimeoutError):
    """A message was not delivered in time, so retrying is reasonable; also a `TimeoutError`."""

    def __init__(self, reason: Reason, path: str, detail: str) -> None:
        super().__init__(reason, path, detail)
        # A TimeoutError is an OSError, which would read three arguments as errno, text and file.
        self.args: tuple[Any, ...] = (reason, self.path, self.detail)
        self.errno: int | None = None
        self.strerror: str | None = None
        self.filename: Any = None
