"""GRPO of a tiny model: a rollout process sends rows, and two data-parallel ranks train on them.

Run it with ``python examples/grpo.py``. It needs no other package than jagcodec and torch, and
takes some ten seconds, half of which are imports. It has four parts:

* The policy: a transformer with experts and images, the same for packed rows and for rectangles.
* The rollout process samples groups of responses, and sends each group as one message.
* The trainer joins the messages, computes advantages, plans micro-batches for all ranks, writes the
  policy's log-probabilities back into the batch, and updates the policy twice.
* The same step in padded rectangles, without jagcodec. At every update it must have the same
  log-probabilities, loss and gradients, within 1e-10 in float64.

The loss is clipped, per token of the batch, with two more terms: truncated importance sampling
between engine and trainer, and the divergence from the engine's top-k.
"""

import pickle
import sys
import tempfile
from datetime import timedelta
from multiprocessing import get_context

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from jagcodec import (
    MicroBatches,
    PackPlan,
    concat_rows,
    decode,
    encode,
    encode_rows,
    join_columns,
    open_wire,
    plan_micro_batches,
    select_rows,
    to_blob,
)
from jagcodec.integrations.torch_distributed import all_gather_rows, broadcast

VOCABULARY, END, CALL, TOOL_SAYS = 64, 1, 2, [7, 8, 9]
WIDTH, HEADS, LAYERS, EXPERTS, CHOSEN = 32, 2, 2, 4, 2
PROMPTS, GROUP, NEW_TOKENS, TOP, LONGEST = 4, 8, 16, 5, 128
STEPS, UPDATES, RANKS, MAX_TOKENS, ROW_MULTIPLE = 3, 2, 2, 512, 8
CLIP, MOST_WEIGHT, DRIFT = 0.2, 2.0, 0.01
TIMEOUT = timedelta(seconds=120)

# Columns of the response alone, next to input_ids, which has the prompt, too.
OF_RESPONSE = ["loss_mask", "logprobs", "top_ids", "top_logprobs"]
# The policy says at cell j how likely token j + 1 is. So the loss reads columns of next tokens.
NEXT = {
    "labels": "input_ids",
    "mask": "loss_mask",
    "engine": "logprobs",
    "top": "top_ids",
    "top_engine": "top_logprobs",
    "old": "old_logprobs",
}


# --- the policy --------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm_of_experts = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x, allowed, chosen):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).transpose(-2, -4)
        query, key, value = heads.unbind(-3)
        attended = scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        inner = self.norm_of_experts(x)
        scores = self.router(inner)
        if chosen is None:
            chosen = scores.topk(CHOSEN).indices
        gates = scores.gather(-1, chosen).softmax(-1)
        of_all = torch.einsum("...i,eij->...ej", inner, self.experts).relu()
        of_chosen = of_all.gather(-2, chosen[..., None].expand(*chosen.shape, WIDTH))
        return x + (gates[..., None] * of_chosen).sum(-2), chosen


class Policy(nn.Module):
    """Cells of any shape: rectangles (N, S) of rows, or rows end to end (T,)."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.colors = nn.Linear(3, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def see(self, images):
        """(N, WIDTH): what the policy knows of each row's image; zeros where there is None."""
        weight = self.colors.weight
        means = [np.zeros(3) if image is None else image.mean((1, 2)) / 255 for image in images]
        return self.colors(torch.tensor(np.array(means), dtype=weight.dtype))

    def forward(self, ids, positions, seen, allowed, experts=None):
        """Logits (..., VOCABULARY), and the experts (LAYERS, ..., CHOSEN), by default the best."""
        x = self.tokens(ids) + self.places(positions) + seen
        routed = []
        for i, block in enumerate(self.blocks):
            x, chosen = block(x, allowed, None if experts is None else experts[i])
            routed.append(chosen)
        return self.head(x), torch.stack(routed)


def token_losses(logits, columns, advantages):
    """What each cell adds to the loss; `columns` are those of `NEXT`, packed or padded."""
    said = logits.log_softmax(-1)
    logprobs = said.gather(-1, columns["labels"][..., None])[..., 0]
    ratio = (logprobs - columns["old"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    weight = (columns["old"] - columns["engine"]).exp().clamp(max=MOST_WEIGHT)
    top = columns["top_engine"]
    drift = (top.exp() * (top - said.gather(-1, columns["top"].long()))).sum(-1)
    return (DRIFT * drift - weight * gain) * columns["mask"]


# --- the rollout process -----------------------------------------------------------------------


def rollout_process(connection):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    numbers = np.random.default_rng(0)
    policy = Policy()  # in float32, as an engine has it
    for step in range(STEPS):
        policy.load_state_dict(decode(next_bytes(connection)))
        for group in range(PROMPTS):
            rows = sampled_group(policy, numbers, f"{step}-{group}", with_image=group % 2 == 1)
            connection.send_bytes(message_of(rows, step))
            connection.send_bytes(pickle.dumps(rows))  # for the comparison


def message_of(rows, step):
    """One message for a whole group: each message has a header, and costs a call."""
    frames = encode_rows(
        rows,
        same_length=["response_ids", *OF_RESPONSE],
        dtypes={"image": object, "reward": torch.float64},  # some rows have no image
        ragged_dims={"experts": 2},  # (layers, tokens, chosen): the tokens come second
        meta={"step": step},
    )
    return to_blob(frames)


def next_bytes(connection):
    if not connection.poll(TIMEOUT.total_seconds()):
        raise SystemExit("nothing came from the other process")
    return connection.recv_bytes()


@torch.no_grad()
def sampled_group(policy, numbers, uid, with_image):
    """Rows as an agent loop has them: lists, arrays and Python objects of one sample each."""
    prompt = numbers.integers(3, VOCABULARY, numbers.integers(4, 40)).tolist()
    image = None
    if with_image:
        image = numbers.integers(0, 256, (3, numbers.integers(8, 20), 16), dtype=np.uint8)
    rows = []
    for _ in range(GROUP):
        response = sample(policy, prompt, image)
        mask, tool_call = [True] * len(response), None
        if response[-1] == CALL:
            tool_call = {"name": "add", "arguments": {"x": response[0]}}
            more = sample(policy, prompt + response + TOOL_SAYS, image)
            mask += [False] * len(TOOL_SAYS) + [True] * len(more)
            response = response + TOOL_SAYS + more
        own = [token for token, learned in zip(response, mask, strict=True) if learned]
        ids = prompt + response
        logits, routed = forward_of_row(policy, ids, image)
        said = logits[len(prompt) - 1 : -1].log_softmax(-1)  # of each token of the response
        top = said.topk(TOP)
        rows.append(
            {
                "input_ids": ids,
                "response_ids": response,
                "loss_mask": mask,
                "logprobs": said[range(len(response)), response].tolist(),
                "top_ids": top.indices.int().numpy(),
                "top_logprobs": top.values.numpy(),
                "experts": routed.byte().numpy(),  # (LAYERS, tokens, CHOSEN)
                "reward": sum(token % 2 == 0 for token in own) / len(own),
                "uid": uid,
                "messages": [{"role": "user", "content": f"question {uid}"}],
                "tool_call": tool_call,
                "image": image,
            }
        )
    return rows


def sample(policy, ids, image):
    """New tokens, up to one that ends the turn."""
    new = []
    while len(new) < NEW_TOKENS and new[-1:] not in ([END], [CALL]):
        logits, _ = forward_of_row(policy, ids + new, image)
        new.append(torch.multinomial(logits[-1].softmax(-1), 1).item())
    return new


def forward_of_row(policy, ids, image):
    cells = len(ids)
    causal = torch.ones(cells, cells, dtype=torch.bool).tril()
    return policy(torch.tensor(ids), torch.arange(cells), policy.see([image]), causal)


# --- the trainer -------------------------------------------------------------------------------

READ = ["input_ids", "experts", "image"]  # by the policy
# Of next tokens, where there is none or it belongs to the prompt; and of experts.
PADS = dict.fromkeys(NEXT, 0) | {"mask": False, "experts": torch.arange(CHOSEN)}


def train(rank, store, rollouts=None):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, timeout=TIMEOUT, rank=rank, world_size=RANKS)
    policy = Policy().double()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(STEPS):
        batch, rows = received(rollouts, policy) if rank == 0 else (None, [])
        batch = broadcast(batch, src=0)  # every rank has all rows, and trains on its own
        batch = join_columns([batch, {"advantages": group_advantages(batch)}])
        batches = planned(batch)
        batch = with_old_logprobs(policy, batch, batches, rank)
        padded = padded_batch(policy, rows) if rank == 0 else {}
        for _ in range(UPDATES):
            loss = add_gradients(policy, batch, batches, rank)
            if rank == 0:
                compare(policy, batch, loss, padded)
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            report(batch, batches, loss)
    dist.barrier()  # with torch 2.6, who leaves after another rank may wait forever
    dist.destroy_process_group()


def received(rollouts, policy):
    """The rows of one step as one batch; and the same rows by pickle, for the comparison."""
    rollouts.send_bytes(to_blob(encode(policy.state_dict())))
    messages, rows = [], []
    for _ in range(PROMPTS):
        messages.append(open_wire(next_bytes(rollouts)))
        rows += pickle.loads(next_bytes(rollouts))  # noqa: S301
    return concat_rows(messages), rows


def group_advantages(batch):
    """(N,): how many standard deviations a reward is above the mean of its group."""
    _, index, counts = np.unique(batch["uid"], return_inverse=True, return_counts=True)
    group, sizes = torch.from_numpy(index), torch.from_numpy(counts)

    def mean(values):
        return (values.new_zeros(len(sizes)).index_add(0, group, values) / sizes)[group]

    above = batch["reward"] - mean(batch["reward"])
    return above / (mean(above**2).sqrt() + 1e-6)


def planned(batch) -> MicroBatches:
    """The same plan on every rank: which rows are in which micro-batch of which rank."""
    lengths = batch.row_lengths("input_ids")
    return plan_micro_batches(lengths, RANKS, max_tokens=MAX_TOKENS, row_multiple=ROW_MULTIPLE)


def packed_logits(policy, plan: PackPlan, columns):
    """Logits (T, VOCABULARY) of a micro-batch; and (T,) the row of each cell."""
    row = torch.from_numpy(np.repeat(np.arange(plan.rows), plan.padded_lengths))
    # On a GPU, give a varlen kernel plan.cu_seqlens_padded in place of this mask.
    allowed = (row[:, None] == row).tril()
    seen, experts = policy.see(columns["image"])[row], columns["experts"].long()
    return policy(columns["input_ids"], plan.position_ids(), seen, allowed, experts)[0], row


@torch.no_grad()
def with_old_logprobs(policy, batch, batches, rank):
    """The batch and one more column: how likely each token is before the updates."""
    found = []
    read = batch.select(READ)
    for plan, columns in batches.pack(read, rank, labels_of="input_ids", pad_value_dict=PADS):
        logits, _ = packed_logits(policy, plan, columns)
        logprobs = logits.log_softmax(-1).gather(-1, columns["labels"][:, None])[:, 0]
        # What a cell says about the next token goes to that token.
        found.append({"old_logprobs": plan.unpack(logprobs, shift=1)})
    of_all_ranks = all_gather_rows(concat_rows(found))  # rank by rank, step by step
    return join_columns([batch, select_rows(of_all_ranks, batches.inverse)])


def add_gradients(policy, batch, batches, rank):
    """The loss per token of the whole batch; its gradients, of all ranks, are in the parameters."""
    tokens = batch["loss_mask"].values().sum()
    learned = batch.select([*READ, *OF_RESPONSE, "old_logprobs", "advantages"])
    micro_batches = batches.pack(
        learned, rank, labels_of=NEXT, align_end=OF_RESPONSE, pad_value_dict=PADS
    )
    total = torch.zeros((), dtype=torch.float64)
    for plan, columns in micro_batches:
        logits, row = packed_logits(policy, plan, columns)
        loss = token_losses(logits, columns, columns["advantages"][row]).sum() / tokens
        loss.backward()
        total += loss.detach()
    for tensor in (total, *(parameter.grad for parameter in policy.parameters())):
        dist.all_reduce(tensor)
    return total


def report(batch, batches, loss):
    sizes = batches.report()
    calls = sum(call is not None for call in batch["tool_call"])
    images = sum(image is not None for image in batch["image"])
    print(
        f"step {batch.meta['step']}: reward {batch['reward'].mean():.3f}, loss {loss:.4f}; "
        f"{len(batch)} rows, {calls} with a call, {images} with an image; "
        f"{sizes['micro_batches']} micro-batches, {sizes['fill']:.0%} of their cells are tokens",
        flush=True,
    )


# --- the same step, padded, without jagcodec ---------------------------------------------------


def padded_batch(policy, rows):
    """Rectangles (N, S, ...) of what the policy reads, and (N, S - 1, ...) of next tokens."""
    lengths = [len(row["input_ids"]) for row in rows]

    def rectangle(columns):
        """(N, S, ...): rows on the left; one of a response after zeros for its prompt."""
        padded = []
        for column, length in zip(columns, lengths, strict=True):
            cells = torch.as_tensor(column)
            before = cells.new_zeros((length - len(cells), *cells.shape[1:]))
            padded.append(torch.cat([before, cells]))
        return pad_sequence(padded, batch_first=True)

    found = {}
    for name, column in NEXT.items():
        if column in rows[0]:
            found[name] = rectangle([row[column] for row in rows])[:, 1:]
    experts = rectangle([row["experts"].swapaxes(0, 1) for row in rows])
    found["experts"] = experts.movedim(2, 0).long()
    found["ids"] = rectangle([row["input_ids"] for row in rows])
    found["valid"] = rectangle([np.ones(length) for length in lengths])[:, 1:]
    found["images"] = [row["image"] for row in rows]
    uids = np.array([row["uid"] for row in rows])
    rewards = np.array([row["reward"] for row in rows])
    groups = [rewards[uids == uid] for uid in uids]
    spreads = np.array([group.std() + 1e-6 for group in groups])
    above = rewards - [group.mean() for group in groups]
    found["advantages"] = torch.from_numpy(above / spreads)[:, None]
    with torch.no_grad():
        said = padded_logits(policy, found).log_softmax(-1)
    found["old"] = said.gather(-1, found["labels"][..., None])[..., 0] * found["valid"]
    return found


def padded_logits(policy, padded):
    ids = padded["ids"]
    width = ids.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    seen = policy.see(padded["images"])[:, None]
    return policy(ids, torch.arange(width), seen, causal, padded["experts"])[0][:, :-1]


def compare(policy, batch, loss, padded):
    """Raise if rectangles have other log-probabilities, another loss or another gradient."""
    losses = token_losses(padded_logits(policy, padded), padded, padded["advantages"])
    expected = losses.sum() / padded["mask"].sum()
    parameters = [*policy.parameters()]
    gradients = [*torch.autograd.grad(expected, parameters)]
    found = [parameter.grad for parameter in parameters]
    old = pad_sequence(batch["old_logprobs"].unbind(), batch_first=True)[:, 1:]
    for ours, theirs in ((old, padded["old"]), (loss, expected.detach()), (found, gradients)):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    most = max((a - b).abs().max().item() for a, b in zip(found, gradients, strict=True))
    print(
        f"packed and padded: losses differ by {abs(loss - expected):.0e}, gradients by {most:.0e}"
    )


# --- processes ---------------------------------------------------------------------------------


def main():
    # A fork need not import torch again. Your own ranks are started by torchrun.
    context = get_context("fork") if sys.platform == "linux" else get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{directory}/store"
        rollouts, other_end = context.Pipe()
        others = [context.Process(target=rollout_process, args=(other_end,), daemon=True)]
        others[0].start()
        other_end.close()  # so that the pipe ends where that process ends
        for rank in range(1, RANKS):
            others.append(context.Process(target=train, args=(rank, store), daemon=True))
            others[rank].start()
        train(0, store, rollouts)
        for process in others:
            process.join()
        if any(process.exitcode for process in others):
            raise SystemExit("a process failed")
    print("every update has the loss and the gradients of padded rectangles")


if __name__ == "__main__":
    main()
