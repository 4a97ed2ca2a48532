# mypy: disable-error-code="call-arg, misc, assignment, type-var, list-item, arg-type"
"""What `encode` takes, `decode` gives back, or `encode` refuses: for every kind of TensorDict."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorStack,
    PersistentTensorDict,
    TensorDict,
    TensorDictBase,
    TensorDictParams,
    UnbatchedTensor,
    lazy_stack,
    set_lazy_legacy,
    tensorclass,
)

from jagcodec import (
    ArgumentError,
    UnsupportedTypeError,
    WireFormatError,
    concat_rows,
    decode,
    encode,
    materialize,
    open_wire,
    register_type,
    select_rows,
)
from jagcodec.ragged.non_tensor import unbatched_parts
from jagcodec.testing import assert_same
from jagcodec.wire.registry import restore
from tests.wire import forge

try:
    from tensordict import TypedTensorDict
except ImportError:  # since 0.12
    TypedTensorDict = None


@register_type
@tensorclass
class Turn:
    tokens: torch.Tensor
    before: Any = None
    role: Any = None


@register_type
@tensorclass
class Dialogue:
    tokens: torch.Tensor
    turn: Turn
    anything: Any = None


@register_type
@tensorclass
class Counted:
    """One whose `__post_init__` must not run on what it has run on."""

    counts: torch.Tensor

    def __post_init__(self):
        self.counts = self.counts + 1


@tensorclass
class Stranger:
    tokens: torch.Tensor


if TypedTensorDict is not None:

    @register_type
    class Typed(TypedTensorDict):
        ids: torch.Tensor


SIZE = (4, 3, 2, 1)


def batch(*size):
    size = size or SIZE
    ids = torch.arange(torch.Size(size).numel() * 3).view(*size, 3)
    return TensorDict({"ids": ids, "reward": torch.rand(size)}, batch_size=size)


def stacked(dim) -> Any:
    pair: Any = [batch(), batch()]
    return torch.stack(pair, dim)


def nested():
    td = batch()
    td["inner"] = batch()
    return td


def turn(*size, **fields):
    size = size or SIZE
    return Turn(tokens=torch.rand(*size, 2), role="user", batch_size=size, **fields)


def ragged_turns():
    turns = [Turn(tokens=torch.arange(n), role=str(n), batch_size=[]) for n in (2, 3)]
    return lazy_stack(turns, 0)


def legacy(make):
    """What operations on shapes return where they return lazy views."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with set_lazy_legacy(True):
            return make()


def grid_of_objects():
    rows = [torch.stack([NonTensorData((i, j)) for i in range(2)]) for j in range(3)]
    return torch.stack(rows)


def with_leaf(leaf):
    """A TensorDict with a leaf that no checked way of setting lets in."""
    td = TensorDict({}, batch_size=[2])
    td._tensordict["leaf"] = leaf
    return td


# After those with which tensordict tests itself, with the kinds that they lack.
KINDS: dict[str, Callable[[], Any]] = {
    "plain": batch,
    "nested": nested,
    "empty": lambda: TensorDict({}, batch_size=[]),
    "no_rows": lambda: batch(0, 2),
    "named": lambda: TensorDict({"a": torch.rand(2, 3)}, batch_size=[2, 3], names=["x", None]),
    "tensorclass": turn,
    "tensorclass_without_values": lambda: Turn(tokens=None, batch_size=[2]),
    "tensorclass_named": lambda: Turn(tokens=torch.rand(2), batch_size=[2], names=["x"]),
    "tensorclass_of_tensorclasses": lambda: Dialogue(
        tokens=torch.rand(2), turn=turn(2), anything=turn(2), batch_size=[2]
    ),
    "tensorclass_of_one_of_its_kind": lambda: turn(before=turn()),
    "tensorclass_with_post_init": lambda: Counted(counts=torch.zeros(2), batch_size=[2]),
    "column_of_tensorclasses": lambda: TensorDict({"turn": turn(2, 3)}, batch_size=[2]),
    "column_with_post_init": lambda: TensorDict(
        {"c": Counted(counts=torch.zeros(2), batch_size=[2])}, batch_size=[2]
    ),
    "stack": lambda: lazy_stack([batch(4, 3), batch(4, 3)], 2),
    "stack_of_nested": lambda: lazy_stack(list(nested().unbind(1)), 1),
    "stack_of_stacks": lambda: lazy_stack([lazy_stack([batch(2), batch(2)], 1)] * 2, 0),
    "stack_of_tensorclasses": lambda: lazy_stack([turn(2), turn(2)], 0),
    "stack_around_tensorclasses": lambda: LazyStackedTensorDict(turn(2), turn(2)),
    "stack_of_ragged_tensorclasses": ragged_turns,
    "column_of_ragged_tensorclasses": lambda: TensorDict({"t": ragged_turns()}, batch_size=[2]),
    "stack_with_tensorclasses_inside": lambda: lazy_stack(
        [TensorDict({"turn": turn(3)}, batch_size=[3]) for _ in range(2)], 0
    ),
    "stack_of_tensorclasses_with_post_init": lambda: lazy_stack(
        [Counted(counts=torch.zeros(3), batch_size=[]) for _ in range(2)], 0
    ),
    "indexed": lambda: stacked(0)[1],
    "sub": lambda: stacked(0)._get_sub_tensordict(1),
    "sub_of_columns": lambda: stacked(1)._get_sub_tensordict((slice(None), 1)),
    "memory_mapped": lambda: batch().memmap_(),
    "permuted": lambda: batch().permute(2, 0, 3, 1),
    "unsqueezed": lambda: batch().unsqueeze(-1),
    "squeezed": lambda: batch().squeeze(3),
    "expanded": lambda: batch().expand(2, *SIZE),
    "lazily_permuted": lambda: legacy(lambda: nested().permute(2, 0, 3, 1)),
    "lazily_unsqueezed": lambda: legacy(lambda: nested().unsqueeze(-1)),
    "lazily_squeezed": lambda: legacy(lambda: nested().squeeze(3)),
    "lazily_viewed": lambda: legacy(lambda: nested().view(-1)),
    "lazily_transposed": lambda: legacy(lambda: nested().transpose(0, 1)),
    "lazily_squeezed_column": lambda: TensorDict(
        {"inner": legacy(lambda: batch(2, 1).squeeze(1))}, batch_size=[2]
    ),
    "parameters": lambda: TensorDictParams(batch()),
    "column_of_parameters": lambda: TensorDict({"p": TensorDictParams(batch(2))}, batch_size=[2]),
    "locked": lambda: batch().lock_(),
    "object": lambda: batch().set_non_tensor("name", "gsm8k"),
    "objects": lambda: TensorDict({"t": NonTensorStack("a", {"b": 1})}, batch_size=[2]),
    "metadata": lambda: MetaData({"step": 3}, batch_size=[2]),
    "metadata_of_a_tensor": lambda: MetaData(torch.rand(3), batch_size=[]),
    "column_of_metadata": lambda: TensorDict({"m": MetaData("x", batch_size=[2])}, batch_size=[2]),
    "metadata_in_a_tensorclass": lambda: turn(2, before=MetaData("k", batch_size=[2])),
    "stack_of_metadata": lambda: NonTensorStack(MetaData(1), MetaData(2)),
    "stack_around_metadata": lambda: lazy_stack(
        [TensorDict({"m": MetaData(i)}, batch_size=[]) for i in range(2)], 0
    ),
    "unbatched": lambda: UnbatchedTensor(torch.arange(7)),
    "column_of_unbatched": lambda: TensorDict(
        {"u": UnbatchedTensor(torch.arange(7)), "a": torch.rand(3)}, batch_size=[3]
    ),
    "grid_of_objects": grid_of_objects,
    "column_of_grids": lambda: TensorDict({"grid": grid_of_objects()}, batch_size=[3]),
    "objects_in_a_grid_without_rows": lambda: NonTensorStack(
        *[NonTensorData(None, batch_size=[0]) for _ in range(2)]
    ),
    "payload_tensorclass": lambda: NonTensorData(turn(2), batch_size=[3]),
    "payload_tensorclasses": lambda: NonTensorStack(NonTensorData(turn(2)), NonTensorData("x")),
    # Refused, because no reader could give them back.
    "tensorclass_of_a_stranger": lambda: Stranger(tokens=torch.rand(2), batch_size=[2]),
    "column_of_a_stranger": lambda: TensorDict(
        {"s": Stranger(tokens=torch.rand(2), batch_size=[2])}, batch_size=[2]
    ),
    "stranger_in_a_tensorclass": lambda: turn(
        2, before=Stranger(tokens=torch.rand(2), batch_size=[2])
    ),
    "negative_rows": lambda: TensorDict({}, batch_size=torch.Size((2, 3, -1))),
    "negative_rows_inside": lambda: TensorDict(
        {"inner": TensorDict({}, batch_size=torch.Size((2, 3, -1)))}, batch_size=[2, 3]
    ),
    "negative_rows_of_an_object": lambda: NonTensorData(1, batch_size=torch.Size((2, -1))),
    "leaf_tuple": lambda: with_leaf((torch.zeros(2), torch.zeros(2))),
    "leaf_list": lambda: with_leaf([torch.zeros(2), torch.zeros(2)]),
    "leaf_string": lambda: with_leaf("x"),
    "leaf_tensorclass_of_other_rows": lambda: with_leaf(turn(3)),
    "leaf_object_of_other_rows": lambda: with_leaf(NonTensorData("x", batch_size=[5])),
    "leaf_metadata_of_other_rows": lambda: with_leaf(MetaData("x", batch_size=[5])),
}
REFUSED = {name for name in KINDS if "stranger" in name or "negative" in name or "leaf_" in name}
REFUSED |= {name for name in KINDS if "named" in name}

with contextlib.suppress(RuntimeError, IndexError):  # since 0.14
    grid_of_objects()[:0]
    KINDS |= {
        "stack_without_rows": lambda: grid_of_objects()[:0],
        "stack_without_columns": lambda: grid_of_objects()[:, :0],
        "column_of_stacks_without_rows": lambda: TensorDict(
            {"grid": grid_of_objects()}, batch_size=[3, 2]
        )[:0],
    }
    REFUSED |= {"stack_without_rows", "column_of_stacks_without_rows"}
if TypedTensorDict is not None:
    KINDS["typed"] = lambda: Typed(ids=torch.arange(6).view(2, 3), batch_size=[2])
    KINDS["column_of_typed"] = lambda: TensorDict({"typed": KINDS["typed"]()}, batch_size=[2])

CONTEXTS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda value: value,
    "in_a_list": lambda value: [value, 1],
    "as_a_payload": lambda value: NonTensorData([value], batch_size=[2]),
    "as_the_payload_of_a_row": lambda value: NonTensorStack(NonTensorData([value]), "x"),
    "as_a_column": lambda value: TensorDict({"column": value}, batch_size=value.batch_size[:1]),
    "in_a_tensorclass": lambda value: Turn(
        tokens=torch.zeros(value.batch_size[:1]), before=value, batch_size=value.batch_size[:1]
    ),
    "in_a_stack": lambda value: LazyStackedTensorDict(
        *[TensorDict({"column": value}, batch_size=value.batch_size) for _ in range(2)]
    ),
}


def as_it_arrives(value):
    """A value with every view of a TensorDict replaced by a TensorDict of what it shows."""
    if type(value) is LazyStackedTensorDict:
        members = [as_it_arrives(member) for member in value.tensordicts]
        return LazyStackedTensorDict(*members, stack_dim=value.stack_dim)
    if TypedTensorDict is not None and isinstance(value, TypedTensorDict):
        return value
    if isinstance(value, TensorDictBase) and not isinstance(value, LazyStackedTensorDict):
        leaves = {key: as_it_arrives(leaf) for key, leaf in value.items()}
        return TensorDict(leaves, batch_size=value.batch_size)
    if isinstance(value, list):
        return [as_it_arrives(item) for item in value]
    return value


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_arrives_or_is_refused(name):
    value = KINDS[name]()
    if name in REFUSED:
        with pytest.raises(UnsupportedTypeError) as raised:
            encode(value)
        assert raised.value.path.startswith("$")
        return
    assert_same(decode(encode(value)), as_it_arrives(value))


NAMED: dict[str, Callable[[], Any]] = {
    "batch": lambda: TensorDict({"a": torch.ones(2)}, [2], names=["rows"]),
    "second dim": lambda: TensorDict({"a": torch.ones(2, 3)}, [2, 3], names=[None, "x"]),
    "tensorclass": lambda: Turn(tokens=torch.rand(2), batch_size=[2], names=["rows"]),
    "members": lambda: lazy_stack([TensorDict({}, [2], names=["rows"])] * 2, 1),
    "stack": lambda: LazyStackedTensorDict(TensorDict({}, []), stack_dim=0, stack_dim_name="x"),
    "empty stack": lambda: LazyStackedTensorDict(stack_dim=0, stack_dim_name="x"),
    "objects": lambda: NonTensorStack("a", "b", stack_dim=0, stack_dim_name="x"),
    "object": lambda: NonTensorData("a", batch_size=[2], names=["rows"]),
    "metadata": lambda: MetaData("a", batch_size=[2], names=["rows"]),
    "view": lambda: legacy(lambda: NAMED["second dim"]().unsqueeze(0)),
}


@pytest.mark.parametrize("name", NAMED)
def test_dim_names_are_refused_with_their_place(name):
    for value, path in ((NAMED[name](), "$"), ({"k": [1, NAMED[name]()]}, "$.k[1]")):
        with pytest.raises(UnsupportedTypeError, match=r"set td\.names = None") as raised:
            encode(value)
        assert raised.value.path.startswith(path)


@given(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(CONTEXTS)))
def test_what_encode_takes_decode_gives_back(name, context):
    try:
        value = CONTEXTS[context](KINDS[name]())
    except Exception:  # tensordict does not let this be there
        return
    try:
        frames = encode(value)
    except UnsupportedTypeError:
        assert name in REFUSED or context not in ("alone", "in_a_list", "as_a_payload")
        return
    # Views inside tensorclasses and payloads arrive as what they show; that is asked above.
    decoded = decode(frames)
    assert_same(decode(encode(decoded)), decoded)
    if name in ARRIVE_AS_THEY_ARE:
        assert_same(decoded, value)


ARRIVE_AS_THEY_ARE = {
    name for name in KINDS if not any(word in name for word in ("lazily", "sub", "parameters"))
}


@pytest.mark.parametrize("name", sorted(set(KINDS) - REFUSED))
def test_open_messages_give_the_same_columns(name):
    value = KINDS[name]()
    if not isinstance(value, TensorDict) or not value.batch_dims:
        return
    opened = open_wire(encode(value))
    assert_same(opened.to_tensordict(), as_it_arrives(value))
    if value.batch_size[0] > 1 and "lazily" not in name:
        chosen = opened.rows([1, 0]).to_tensordict()
        assert_same(chosen, select_rows(decode(encode(value)), [1, 0]))
        for before, after in zip(value.unbind(0)[:2], reversed(chosen.unbind(0)), strict=True):
            for key, leaf in before.items():
                if type(leaf) is torch.Tensor:
                    assert_same(after.get(key), leaf.detach().contiguous())


def test_a_post_init_does_not_run_again():
    value = Counted(counts=torch.zeros(2), batch_size=[2])
    assert value.counts.tolist() == [1, 1]
    assert decode(encode(value)).counts.tolist() == [1, 1]
    column = decode(encode(TensorDict({"c": value}, batch_size=[2])))
    assert column["c"].counts.tolist() == [1, 1]


def test_a_field_that_is_none_stays_one():
    value = decode(encode(turn(2)))
    assert value.before is None
    assert value.role == "user"
    value.before = torch.ones(2)
    assert value.before.tolist() == [1, 1]


@pytest.mark.parametrize(
    "state",
    [
        {"tokens": torch.zeros(2)},
        NonTensorStack("a"),
        (TensorDict({}, batch_size=[2]),),
        (TensorDict({}, batch_size=[2]), {"other": 1}),
        (TensorDict({"tokens": torch.zeros(2)}, batch_size=[2]), {"tokens": 1}),
        (TensorDict({}, batch_size=[2]), [("role", 1)]),
        TensorDict({"other": torch.zeros(2)}, batch_size=[2]),
        torch.zeros(2),
    ],
)
def test_forged_states_of_tensorclasses_are_refused(state):
    with pytest.raises(WireFormatError, match="expected the state of"):
        restore(f"{Turn.__module__}.Turn", state)


def test_columns_of_tensorclasses_have_the_rows_of_their_batch():
    td = TensorDict({"turn": turn(2)}, batch_size=[2])
    inner = forge.tensordict([2], {"tokens": forge.tensor(shape=(2,))})
    for rows in (2, 3):
        state = forge.node("USER", f"{Turn.__module__}.Turn", children=[inner])
        frames = forge.message(forge.tensordict([rows], {"turn": state}), bytes(2))
        if rows == 2:
            assert type(decode(frames)["turn"]) is type(td["turn"])
            continue
        for read in (decode, lambda frames: open_wire(frames).to_tensordict()):
            with pytest.raises(WireFormatError, match="batch size"):
                read(frames)


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("tensordict.MetaData", "x"),
        ("tensordict.MetaData", MetaData("x")),
        ("tensordict.UnbatchedTensor", torch.zeros(2)),
        ("tensordict.UnbatchedTensor", ((2,), torch.zeros(2))),
        ("tensordict.UnbatchedTensor", (None, "x")),
    ],
)
def test_forged_states_of_tensordicts_types_are_refused(name, state):
    with pytest.raises(WireFormatError, match="expected the state of"):
        restore(name, state)


def test_registered_metadata_does_not_recurse():
    register_type(MetaData, "tests.MetaData")
    try:
        assert_same(decode(encode(MetaData([1]))), MetaData([1]))
    finally:
        register_type(MetaData, "tensordict.MetaData")


@pytest.mark.parametrize("kind", ["tensorclass_of_a_stranger", "column_of_a_stranger"])
def test_the_remedy_of_a_refused_tensorclass_works(kind):
    class_ = tensorclass(type("Once", (), {"__annotations__": {"tokens": torch.Tensor}}))
    value: Any = class_(tokens=torch.rand(2), batch_size=[2])
    value = value if kind.startswith("tensorclass") else TensorDict({"s": value}, batch_size=[2])
    with pytest.raises(UnsupportedTypeError, match="register_type"):
        encode(value)
    register_type(class_, f"tests.{kind}")
    assert_same(decode(encode(value)), value)


@pytest.mark.skipif(TypedTensorDict is None, reason="tensordict has had them since 0.12")
def test_the_remedy_of_a_refused_typed_tensordict_works():
    class Local(TypedTensorDict):
        ids: torch.Tensor

    x = Local(ids=torch.arange(2), batch_size=[2])
    with pytest.raises(UnsupportedTypeError, match=r"TensorDict\(dict\(x.items\(\)\)"):
        encode(x)
    plain = TensorDict(dict(x.items()), x.batch_size)
    assert_same(decode(encode(plain)), plain)


def test_lazy_views_of_ragged_rows_are_refused_with_a_reason():
    rows = [TensorDict({"a": torch.zeros(1, n)}, batch_size=[1]) for n in (1, 2)]
    view = legacy(lambda: lazy_stack(rows, 0).view(2))
    with pytest.raises(UnsupportedTypeError, match="encode what it is a view of"):
        encode(view)


def test_levels_of_stacks_count_through_tensorclasses():
    value: Any = turn(1)
    for _ in range(40):
        value = turn(1, before=LazyStackedTensorDict(TensorDict({"t": value}, batch_size=[1])))
        value = LazyStackedTensorDict(TensorDict({"t": value}, batch_size=[1]))
        value = value[0]["t"]
    with pytest.raises(UnsupportedTypeError):
        encode(value)


def test_rows_of_batches_with_tensorclasses_can_be_chosen():
    td = TensorDict({"turn": turn(3), "m": MetaData("x", batch_size=[3])}, batch_size=[3])
    chosen = select_rows(td, [2, 0])
    assert_same(chosen["turn"].tokens, td["turn"].tokens[[2, 0]])
    assert type(chosen["turn"]) is Turn
    assert type(chosen.get("m")) is MetaData
    assert chosen.get("m").batch_size == torch.Size([2])


def test_persistent_tensordicts_arrive_as_tensordicts(tmp_path):
    pytest.importorskip("h5py")
    td = PersistentTensorDict.from_dict(nested(), filename=str(tmp_path / "td.h5"))
    assert_same(decode(encode(td)), nested())


def columns_of_every_kind(i=0):
    """Columns that rows are joined of: `i` is in their cells."""
    return TensorDict(
        {
            "ids": torch.arange(2) + i,
            "turn": Turn(tokens=torch.full((2, 3), i), role="user", batch_size=[2]),
            "shared": UnbatchedTensor(torch.ones(5)),
            "note": MetaData("k", batch_size=[2]),
        },
        batch_size=[2],
    )


def test_columns_of_every_kind_are_joined_padded_and_sent_on():
    parts = [columns_of_every_kind(i) for i in range(3)]
    opened = [open_wire(encode(part)) for part in parts]
    for whole in (concat_rows(parts), concat_rows(opened).to_tensordict()):
        assert whole["ids"].tolist() == [0, 1, 1, 2, 2, 3]
        assert type(whole.get("turn")) is Turn
        assert whole.get("turn").tokens[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
        assert whole.get("turn").role == "user"
        assert isinstance(whole.get("shared"), UnbatchedTensor)
        assert unbatched_parts(whole.get("shared"))[1].shape == (5,)
    for message in (parts[0], encode(parts[0]), opened[0].rows([0, 1]).to_frames()):
        found = materialize(message)
        assert found["turn"].tokens.shape == (2, 3)
        assert unbatched_parts(found["shared"])[1].shape == (5,)
    part = decode(concat_rows(opened).rows([5, 0]).to_frames())
    assert part.get("turn").tokens[:, 0].tolist() == [2, 0]


def test_what_belongs_to_all_rows_is_joined_only_if_it_is_the_same():
    one, other = columns_of_every_kind(), columns_of_every_kind()
    other.set("shared", UnbatchedTensor(torch.zeros(5)))
    with pytest.raises(
        ArgumentError, match=r"\['shared'\] of batch 1: expected the same Unbatched"
    ):
        concat_rows([one, other])
    other = columns_of_every_kind()
    turns = Turn(tokens=torch.ones(2, 3, dtype=torch.int64), role="system", batch_size=[2])
    other.set("turn", turns)
    roles = concat_rows([one, other])
    assert list(roles.get("turn").role) == ["user", "user", "system", "system"]
