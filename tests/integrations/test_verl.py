"""verl's own classes on the wire and through a real Ray, worker groups of verl included."""

import enum
import warnings

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from jagcodec import UnsupportedTypeError, decode, encode

pytest.importorskip("verl", reason="verl is not installed: see docs/verl.md")

import ray
from PIL import Image
from verl import DataProto
from verl.single_controller.base import Worker, decorator
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.utils.padding import left_right_2_no_padding

from jagcodec.integrations import verl as integration
from tests import oracle
from tests.helpers import nested, receive, size, trip
from tests.integrations.conftest import get

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of Ray, about what verl imports
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


class PadMode(str, enum.Enum):  # noqa: UP042, like verl's DatasetPadMode
    NO_PADDING = "no_padding"


PROMPT, RESPONSE, PAD = 40, 60, 151_643

pytestmark = pytest.mark.cluster


def make_dataproto(rows=24):
    """What verl's agent loop makes: prompts padded on the left, responses on the right."""
    draw = torch.Generator().manual_seed(5)
    row, place = torch.arange(rows)[:, None], torch.arange(-PROMPT, RESPONSE)
    prompt = row % PROMPT + 1  # from one token to all
    response = (row * 7) % (RESPONSE + 1)  # from none to all
    mask = ((place >= -prompt) & (place < response)).long()
    ids = torch.randint(0, 150_000, mask.shape, generator=draw)
    ids = ids.where(mask.bool(), torch.tensor(PAD))
    experts = torch.randint(0, 99, (*mask.shape, 2, 2), generator=draw).to(torch.uint8)
    drawn = [torch.randn(rows, RESPONSE, generator=draw) for _ in range(3)]
    response_mask = mask[:, PROMPT:].clone()
    response_mask[:, 3:6] = 0  # what a tool said
    tensors = {
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "response_mask": response_mask,
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clip(min=0),
        "old_log_probs": drawn[0].where(mask[:, PROMPT:].bool(), torch.tensor(0.0)),
        "kl": drawn[1] * mask[:, PROMPT:],  # pads 0.0 and -0.0
        "entropys": drawn[2].bfloat16(),  # nothing is padding
        "routed_experts": experts.mul_(mask[..., None, None]),
        "reward": torch.arange(float(rows)),
    }
    messages, images = (np.empty(rows, dtype=object) for _ in range(2))
    messages[:] = [[{"role": "user", "content": f"question {row}"}] for row in range(rows)]
    images[:] = [{"pixel_values": torch.full((2, 3), float(row))} for row in range(rows)]
    non_tensors = {
        "uid": np.array([f"u{row // 4}" for row in range(rows)], dtype=object),
        "raw_prompt": messages,
        "__num_turns__": np.arange(rows, dtype=np.int32),
        "multi_modal_inputs": images,
    }
    meta = {"temperature": 0.7, "global_token_num": mask.sum(dim=1).tolist(), "eos": (1, None)}
    meta["metrics"] = [{"actor/loss": [0.5, float("nan")]}]
    return DataProto.from_dict(tensors, non_tensors, meta)


def assert_same(found, sent):
    if isinstance(sent, DataProto):
        assert type(found) is DataProto
        for name in ("batch", "non_tensor_batch", "meta_info"):
            oracle.assert_same(getattr(found, name), getattr(sent, name), name)
    else:
        oracle.assert_same(found, sent)


# What verl's constructor would refuse, but verl itself sends.
UNCHECKED = DataProto()
vars(UNCHECKED).update(non_tensor_batch={"list": ["no", "array"]}, meta_info=None)
LEAVES = {
    "first": torch.zeros(3, 900),
    "ragged": nested([range(n) for n in (3, 0, 2)]),
    "payload": NonTensorData({"a": 1}, batch_size=[3]),
    "inner": TensorDict({"x": torch.ones(3, 900)}, batch_size=[3]),
    "last": torch.arange(3),
}


class TestFrames:
    def test_a_dataproto_comes_back(self):
        data = make_dataproto()
        for frames in (encode(data), encode(data, narrow=True), encode(data, elide=True)):
            found = decode(receive(frames))
            assert_same(found, data)
            found.check_consistency()
        assert_same(data, make_dataproto())  # and is what it was
        assert size(encode(data, narrow=True)) < size(encode(data))

    def test_padding_is_left_behind(self):
        """Only what is in the rows is sent: per-token columns, by names of verl's."""
        data = make_dataproto(200)
        state = integration._state_of_proto(data)
        rectangular = {"kl", "entropys", "reward"}
        assert set(state["trimmed"]) == set(data.batch.keys()) - rectangular
        padded = sum(column.nbytes for column in data.batch.values())
        assert size(encode(data.select(non_tensor_batch_keys=[]))) < 0.55 * padded

    def test_chunks_come_back_and_concat(self):
        """As verl dispatches: views of a batch, of which each sends its own rows alone."""
        data = make_dataproto()
        chunks = data.chunk(4)
        found = DataProto.concat([trip(chunk) for chunk in chunks])
        assert_same(found, DataProto.concat(chunks))
        assert max(size(encode(chunk)) for chunk in chunks) < size(encode(data)) / 2

    def test_batches_at_the_edge_come_back(self):
        for data in (
            DataProto(),
            DataProto(meta_info={"only": [1, {"a": None}]}),
            DataProto(non_tensor_batch={"uid": np.array(["a", {"b": 1}], dtype=object)}),
            DataProto(batch=TensorDict({}, batch_size=[3])),
            DataProto.from_dict(tensors={"ids": torch.zeros(0, 900, dtype=torch.int64)}),
            DataProto.from_dict(tensors={"ids": torch.zeros(900, 0)}),
            DataProto.from_dict(tensors={"ids": torch.zeros(2, 900)}),
            DataProto.from_dict(tensors={"ids": torch.ones(2, 3, 900, dtype=torch.bool)}),
            UNCHECKED,
            DataProto(batch=TensorDict(LEAVES, batch_size=[3])),
        ):
            assert_same(trip(data), data)


class TestTensorDicts:
    """verl's newer batches: TensorDicts of jagged columns, made by its own functions."""

    def no_padding(self):
        names = ["input_ids", "attention_mask", "response_mask", "position_ids", "old_log_probs"]
        return left_right_2_no_padding(make_dataproto().select(batch_keys=names).to_tensordict())

    def test_a_batch_without_padding_comes_back(self):
        td = self.no_padding()
        assert td["input_ids"]._min_seqlen_tensor is None  # which verl does not cache
        found = trip(td)
        assert_same(found, td)
        assert tu.get(found, "max_seq_len") == PROMPT + RESPONSE
        padded = found["input_ids"].to_padded_tensor(0)
        assert padded.shape[1] == max(map(len, td["input_ids"].unbind()))

    def test_what_comes_back_goes_on_in_verl(self):
        metric = Metric("max")
        metric.extend([0.5, 2.0])
        td = tu.get_tensordict(
            {"ids": torch.arange(2), "turn_scores": [[], [0.5, {"a": None}]]},
            {"metrics": {"loss": metric}, "validate": False},
        )
        found = decode(encode(td))
        assert tu.get(found, "turn_scores") == [[], [0.5, {"a": None}]]
        assert tu.get(found, "validate") is False
        assert tu.get(found, "metrics")["loss"].aggregate() == 2.0
        assert tu.get(found, "metrics")["loss"].aggregation == metric.aggregation

        td = self.no_padding()
        halves = [decode(encode(half)) for half in tu.chunk_tensordict(td, 2)]
        found = tu.concat_tensordict(halves)
        assert_same(found["input_ids"], td["input_ids"])
        assert tu.get(found, "uid") == tu.get(td, "uid")


class TestRay:
    def test_arguments_and_results_of_workers(self, registered):
        @ray.remote
        def work(data, more):
            from ray import cloudpickle

            data.batch["old_log_probs"] *= 2
            data.non_tensor_batch["uid"][0] = "changed"
            written = cloudpickle.dumps(data)
            data.meta_info["hook"] = b"jagcodec.integrations.verl" in written
            return data, len(more["data"]), more["td"]

        @ray.remote(runtime_env={"worker_process_setup_hook": None})
        def read(data):  # which needs no hook
            return data.batch["input_ids"].sum().item(), len(data)

        image = Image.new("RGB", (3, 2), (9, 8, 7))
        column = tu.nested_tensor_from_tensor_list([torch.arange(3), torch.arange(1)])
        td = tu.get_tensordict({"ids": column, "images": [[image], []]}, {"step": 3})
        data = make_dataproto(200)
        assert get(read.remote(data)) == (data.batch["input_ids"].sum().item(), 200)
        found, rows, back = get(work.remote(data, {"data": data[:5], "td": td}))
        assert_same(back["ids"], column)
        assert tu.get(back, "images") == [[image], []]
        assert tu.get(back, "step") == 3
        assert rows == 5
        assert found.meta_info.pop("hook")
        assert found.non_tensor_batch["uid"][0] == "changed"
        data.batch["old_log_probs"] *= 2
        data.non_tensor_batch["uid"][0] = "changed"
        assert_same(found, data)

    def test_a_worker_group_of_verl(self, registered):
        """Dispatched in chunks, collected and joined by verl, worked on by two of its workers."""

        mesh = decorator.make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")

        @ray.remote
        class Critic(Worker):
            def __init__(self):
                super().__init__()
                self._register_dispatch_collect_info("actor", dp_rank=self.rank, is_collect=True)

            @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
            def compute_values(self, data):
                tensors = {
                    "values": data.batch["old_log_probs"] * 2,
                    "ids": data.batch["input_ids"],
                }
                metrics = {"rows": len(data), "rank": self.rank}
                uid = {"uid": data.non_tensor_batch["uid"]}
                return DataProto.from_dict(tensors, uid, {"metrics": metrics})

            def same(self, data):
                return data

            later = register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)(same)
            back = register(dispatch_mode=mesh)(same)

        pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Critic), device_name="cpu")
        data = make_dataproto()
        found = group.compute_values(data)
        assert_same(found.batch["values"], data.batch["old_log_probs"] * 2)
        assert_same(found.batch["ids"], data.batch["input_ids"])
        assert_same(found.non_tensor_batch["uid"], data.non_tensor_batch["uid"])
        assert found.meta_info["metrics"] == {"rows": [12, 12], "rank": [0, 1]}

        future = group.later(data)  # a DataProtoFuture, straight into the next call
        assert_same(group.compute_values(future).batch["ids"], data.batch["input_ids"])
        assert_same(group.later(data).get(), DataProto.concat(data.chunk(2)))

        # Put in parallel, once for each rank.
        assert_same(group.back(data), DataProto.concat(data.chunk(2)))
        rows = [torch.arange(n) for n in (3, 1, 2, 5)]
        td = tu.get_tensordict({"ids": tu.nested_tensor_from_tensor_list(rows)}, {"step": 3})
        found = group.back(td)
        assert [row.tolist() for row in found["ids"].unbind()] == [row.tolist() for row in rows]
        assert tu.get(found, "step") == 3

    def test_it_is_this_wire_and_members_of_enums_arrive_as_themselves(self, registered):
        data = make_dataproto()
        data.meta_info["pad_mode"] = PadMode.NO_PADDING
        td = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
        td.set_non_tensor("pad_mode", PadMode.NO_PADDING)
        for value in (data, td):
            message = ray.cloudpickle.dumps(value)
            assert b"jagcodec.integrations.verl" in message
            assert b"torch" not in message  # no state of verl's own
            arrived = ray.cloudpickle.loads(message)
            mode = arrived.meta_info["pad_mode"] if value is data else arrived["pad_mode"]
            assert mode is PadMode.NO_PADDING

    def test_subclasses_go_as_they_did(self, registered):
        class Special(DataProto):
            pass

        special = Special(batch=make_dataproto().batch)
        assert type(ray.cloudpickle.loads(ray.cloudpickle.dumps(special))).__name__ == "Special"
        with pytest.raises(UnsupportedTypeError, match="Special"):
            encode(special)
