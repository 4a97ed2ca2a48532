"""GRPO of a tiny model: two rollout processes send rows, two data-parallel ranks train on them.

Run it with ``python examples/grpo.py``. It needs transformers and pyzmq, and downloads nothing.

Each rollout process samples eight responses to each of its prompts, in two turns with a tool's
answer in between, and sends its rows as one message. The trainer joins the messages, computes the
advantages of each group, plans micro-batches of equal count for all ranks, and packs them. It
writes log-probabilities back into the batch, and takes a step. On its way it checks that the rows
that arrive are those that were sent, bit for bit, and that packed rows and padded rectangles have
the same loss and the same gradients; it prints what each of the two costs.
"""

import hashlib
import pickle
import tempfile
from multiprocessing import get_context

import numpy as np
import torch
import torch.distributed as dist
import zmq
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from jagcodec import (
    RowBuilder,
    concat_rows,
    decode,
    encode,
    encode_rows,
    join_columns,
    materialize,
    open_wire,
    plan_micro_batches,
    select_rows,
    to_rows,
)
from jagcodec.integrations.torch_distributed import all_gather_rows, broadcast
from jagcodec.integrations.zmq import recv_frames, send_frames

VOCABULARY, PAD, END = 512, 0, 1
WORKERS, RANKS, STEPS = 2, 2, 3
PROMPTS, GROUP, NEW_TOKENS, TOOL_SAYS = 4, 8, 24, [7, 8, 9, 10]
MAX_TOKENS, ROW_MULTIPLE, CLIP = 1024, 8, 0.2
TIMEOUT = 120
PER_TOKEN = ["input_ids", "response_mask", "rollout_logprobs"]
# A model says at position j how likely token j + 1 is, so its targets are columns of next tokens.
TARGETS = {"labels": "input_ids", "loss_mask": "response_mask"}
PADS = {"input_ids": PAD, "loss_mask": False}


def new_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, eos_token_id=END, **sizes, **tokens))


# --- rollout -----------------------------------------------------------------------------------


def sample(model, rows):
    """Continue each row: its new ids and their log-probabilities."""
    ids = pad_sequence([torch.tensor(row) for row in rows], True, PAD, "left")
    how = {"do_sample": True, "suppress_tokens": [PAD], "max_new_tokens": NEW_TOKENS}
    wanted = {"return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, attention_mask=(ids != PAD).long(), **how, **wanted)
    new = out.sequences[:, ids.shape[1] :]
    logprobs = torch.stack(out.logits, 1).log_softmax(-1).gather(-1, new[..., None])[..., 0]
    lengths = ((new == END).cumsum(1) == 0).sum(1) + 1  # with the end, if there is one
    return [(new[i, :n].tolist(), logprobs[i, :n]) for i, n in enumerate(lengths.tolist())]


def rollout(model, step, worker):
    """The rows of one step: `GROUP` samples of each prompt, of two turns each."""
    rng = np.random.default_rng([step, worker])
    torch.manual_seed(1000 * step + worker)
    prompts = [rng.integers(2, VOCABULARY, rng.integers(5, 60)).tolist() for _ in range(PROMPTS)]
    said = [prompt for prompt in prompts for _ in range(GROUP)]
    builders = [RowBuilder({"rollout_logprobs": torch.float32}) for _ in said]
    for builder, ids in zip(builders, said, strict=True):
        builder.append(input_ids=ids, response_mask=False, rollout_logprobs=0.0)
    for turn in range(2):
        if turn:
            for builder in builders:
                builder.append(input_ids=TOOL_SAYS, response_mask=False, rollout_logprobs=0.0)
            said = [ids + TOOL_SAYS for ids in said]
        answers = sample(model, said)
        for builder, (ids, logprobs) in zip(builders, answers, strict=True):
            builder.append(input_ids=ids, response_mask=True, rollout_logprobs=logprobs)
        said = [ids + new for ids, (new, _) in zip(said, answers, strict=True)]
    made = [builder.to_row() for builder in builders]
    for i, row in enumerate(made):
        answer = row["input_ids"][row["response_mask"]]
        row["reward"] = np.float32((answer % 2 == 0).mean())
        row["uid"] = f"{step}-{worker}-{i // GROUP}"
        row["messages"] = [{"role": "tool", "content": "ok", "turns": 2}]
    return made


def rollout_process(port, worker):
    torch.set_num_threads(1)
    model = new_model()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(f"tcp://127.0.0.1:{port}")
        send_frames(socket, encode("ready"), timeout=TIMEOUT)
        for step in range(STEPS):
            model.load_state_dict(decode(recv_frames(socket, timeout=TIMEOUT).frames))
            rows = rollout(model, step, worker)
            meta = {"worker": worker, "digest": digest(rows)}
            frames = encode_rows(rows, same_length=PER_TOKEN, meta=meta)
            send_frames(socket, frames, timeout=TIMEOUT).wait(timeout=TIMEOUT)


def digest(rows):
    """A hash of the names and every bit of some rows, whether they are of arrays or of tensors."""
    found = hashlib.sha256()
    for row in rows:
        for name, value in row.items():
            if not isinstance(value, str | list):
                array = np.asarray(value)
                value = str(array.dtype), array.shape, array.tobytes()
            found.update(repr((name, value)).encode())
    return found.hexdigest()


# --- training ----------------------------------------------------------------------------------


def group_advantages(batch):
    """(N,): how many standard deviations a reward is above the mean of its group."""
    rewards = batch["reward"]
    _, numbers, counts = np.unique(batch["uid"], return_inverse=True, return_counts=True)
    group, sizes = torch.from_numpy(numbers), torch.from_numpy(counts)
    above = rewards - (torch.zeros(len(sizes)).index_add(0, group, rewards) / sizes)[group]
    spread = (torch.zeros(len(sizes)).index_add(0, group, above**2) / sizes).sqrt()[group]
    return above / (spread + 1e-6)


def grpo_loss(logprobs, old_logprobs, advantages, mask, tokens):
    """The clipped loss of some tokens; over all micro-batches of all ranks, the loss per token."""
    ratio = (logprobs - old_logprobs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gain * mask).sum() / tokens


def packed_logprobs(model, plan, columns):
    """(T,): how likely the next token of each cell is; transformers finds rows by positions."""
    ids, positions = columns["input_ids"][None], plan.position_ids()[None]
    logits = model(ids, position_ids=positions, use_cache=False).logits[0]
    return -cross_entropy(logits, columns["labels"], reduction="none")  # 0 where there is none


def packed_loss(model, plan, columns, tokens):
    logprobs = packed_logprobs(model, plan, columns)
    advantages = columns["advantages"].repeat_interleave(torch.from_numpy(plan.padded_lengths))
    return grpo_loss(logprobs, columns["old"], advantages, columns["loss_mask"], tokens)


def padded_loss(model, batch, rows, tokens):
    """The same loss of the same rows, from rectangles."""
    micro = materialize(select_rows(batch, rows), attention_mask_of="input_ids")
    ids, mask = micro["input_ids"], micro["attention_mask"]
    logits = model(ids, attention_mask=mask.long(), use_cache=False).logits[:, :-1]
    logprobs = -cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    old, valid = micro["old_logprobs"][:, 1:], micro["response_mask"][:, 1:]
    return grpo_loss(logprobs, old, micro["advantages"][:, None], valid, tokens)


def train_step(model, optimizer, batch, rank):
    """One step over the rows of all workers; every rank has all of them, and trains on its own."""
    tokens = int(batch["response_mask"].values().sum())
    batch = join_columns([batch, {"advantages": group_advantages(batch)}])
    lengths = open_wire(batch).row_lengths("input_ids")
    assert lengths is not None  # the column is jagged
    batches = plan_micro_batches(lengths, RANKS, max_tokens=MAX_TOKENS, row_multiple=ROW_MULTIPLE)

    # What the policy says before the step: put back into rows, and written into the batch.
    micros = batches.pack(batch, rank, labels_of=TARGETS, pad_value_dict=PADS)
    with torch.no_grad():
        found = [plan.unpack(packed_logprobs(model, plan, cols), shift=1) for plan, cols in micros]
    mine = concat_rows([{"old_logprobs": logprobs} for logprobs in found])
    batch = join_columns([batch, select_rows(all_gather_rows(mine), batches.inverse)])

    targets, pads = {**TARGETS, "old": "old_logprobs"}, {**PADS, "old": 0.0}
    micros = batches.pack(batch, rank, labels_of=targets, pad_value_dict=pads)
    loss = 0.0
    for plan, columns in micros:
        part = packed_loss(model, plan, columns, tokens)
        part.backward()
        loss += part.item()
    if rank == 0:
        compare(model, batch, batches, micros, tokens, loss)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def compare(model, batch, batches, micros, tokens, loss):
    """See that padded rectangles of the same rows have the same loss and the same gradients."""
    packed = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    parts = [padded_loss(model, batch, rows, tokens) for rows in batches[0]]
    sum(parts).backward()
    padded = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(sum(parts).item(), loss, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(packed, padded, rtol=1e-3, atol=1e-5)
    for parameter, gradient in zip(model.parameters(), packed, strict=True):
        parameter.grad = gradient
    lengths = batch["input_ids"].offsets().diff()
    cells = sum(plan.total for plan, _ in micros)
    rectangles = sum(len(rows) * int(lengths[rows].max()) for rows in batches[0])
    print(f"  packed and padded have one loss; {cells:,} cells of a forward, not {rectangles:,}")


def received(socket, peers, model):
    """The rows that the workers sent in one step, as one batch, in the order of the workers."""
    weights = encode(model.state_dict())
    for peer in peers:
        send_frames(socket, weights, envelope=peer, timeout=TIMEOUT)
    frames = [recv_frames(socket, timeout=TIMEOUT).frames for _ in peers]
    messages = sorted(map(open_wire, frames), key=lambda message: message.meta["worker"])
    for message in messages:
        rows = to_rows(message)
        if digest(rows) != message.meta["digest"]:
            raise SystemExit("a row that arrived differs from the one that was sent")
    batch = concat_rows(messages)
    padded = pickle.dumps(dict(materialize(batch)), protocol=5)
    sent = sum(len(frame) for own in frames for frame in own)
    print(f"  {len(batch)} rows arrived bit for bit, in {sent:,} bytes; padded: {len(padded):,}")
    return batch


def train(rank, store):
    torch.set_num_threads(1)
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        peers, workers = [], []
        if rank == 0:
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            workers = [start(rollout_process, port, i) for i in range(WORKERS)]
            peers = [recv_frames(socket, timeout=TIMEOUT).envelope for _ in workers]
        for step in range(STEPS):
            batch = broadcast(received(socket, peers, model) if rank == 0 else None, src=0)
            loss = train_step(model, optimizer, batch, rank)
            reward = float(batch["reward"].mean())
            print(f"step {step}, rank {rank}: reward {reward:.3f}, loss {loss:.6f}", flush=True)
    for worker in workers:
        worker.join()
    dist.destroy_process_group()


def start(function, *arguments):
    daemon = function is rollout_process  # it ends with the rank that started it
    process = get_context("spawn").Process(target=function, args=arguments, daemon=daemon)
    process.start()
    return process


def main():
    with tempfile.TemporaryDirectory() as directory:
        ranks = [start(train, rank, f"{directory}/store") for rank in range(RANKS)]
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
