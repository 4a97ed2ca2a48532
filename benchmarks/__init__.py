"""What jagcodec costs and saves, compared with other ways to send the same batch.

    python -m benchmarks.bench     trips of whole batches compared with other formats; small
                                   messages; rows in, joined and out
    python -m benchmarks.bytes     which option of `encode` saves how many bytes, at what cost
    python -m benchmarks.experts   routed experts: each way to send them, one column or several
    python -m benchmarks.planes    through Ray, verl's DataProto, torch.distributed, TransferQueue
    python -m benchmarks.packing   plans of packed rows, micro-batches, and the data path of a step
    python -m benchmarks.before    trips and single operations, compared with an earlier revision
    python -m benchmarks.verl_v1   a training step of verl, and a batch of NeMo-RL
    python -m benchmarks.gpu       on a GPU: to messages and back, and padded there

Every program verifies each result bit for bit, outside the clock; a difference ends it with exit
status 1. With ``--write``, all but `before` store a record in docs/measured/ with the commit that
was measured, and `report` writes the tables of README.md and docs/ from the records.

A *trip* takes six padded per-token columns at the producer to the same six padded columns at the
consumer, in these steps, each timed by itself:

    send       padded columns and lengths -> frames, in the steps of the side (pack, encode)
    copy       each frame -> a receive buffer, once: the least that a transport does
    receive    the receive buffers -> padded columns, in the steps of the side (decode, materialize)
    touch      one byte of each page of the columns is read, so that zero pages which the kernel
               has only promised are paid for inside the clock

Each side is its own process, new for every batch. In one process each would live in the heap that
another leaves, and whether memory is fresh decides more than anything else. Sides take turns, in an
order drawn anew for every round. A turn is a cold trip, then a trip that does not count, then a
warm one (`trips`). The receive buffers of every side are allocated once. Garbage is collected
before a trip, never in it; the result of a trip lives until the next one is done, as in a training
loop. Times are medians; ratios are medians of the ratios within each round, because the clock of a
shared machine drifts. The number of threads is left as each library chose it.

Where the comparison is biased: jagcodec's authors wrote it, and chose the batches. One process
plays producer and consumer, so trips measure no network, store, or scheduler. Every column is
per-token and none is a Python object, because TransferQueue 0.1.11 loses non-tensor columns. A
frame per row is what the per-row encoder makes of jagged columns; batches of few long rows suit it
best. Lengths are long-tailed: if every row is equally long, padded formats win, and the shapes
``512x1536@0.1`` to ``@1`` show where.
"""
