"""What a trip of a rollout batch costs, beside other ways to send it: `make bench`.

A *trip* takes six padded per-token columns at the write site to the same six padded columns at
the fetch site, in these steps, each timed by itself:

    send       padded columns and lengths -> frames, in the steps of the side (pack, encode)
    copy       each frame -> a receive buffer, once: what a transport does at the least
    receive    the receive buffers -> padded columns, in the steps of the side (decode, materialize)
    touch      one byte of each page of the columns is read, so that zero pages which the kernel
               has only promised are paid for inside the clock

A *side* is one way to do it: `sides` has those of jagcodec and the floor, `peers` the others. The
floor is no codec but what no codec can beat in memory that it reuses: three copies of the valid
bytes (pack, copy, materialize) and one fill of the rectangles with the pad.

How trips are measured. Each side is a process of its own, new for every batch, because in one
process each would live in the heap that another leaves behind, and whether memory is fresh decides
more than anything else. Sides take turns, in an order drawn anew for every round, so that a slow
moment of the machine, and what one side does to its memory, hits all of them. A turn is two trips,
of which the second counts. The first, which is reported beside it, finds the code of its process
evicted from the caches and its freed memory reclaimed, like a process that sends only occasionally.
All read the same input, mapped from one place. The receive buffers of every side are allocated once
and written again by each trip. Garbage is collected before a trip, never in it; what a trip made
lives until the clock stopped and is freed after. Every column of every trip, warm-up included, is
compared bit by bit with the input; a difference ends the benchmark with exit status 1. Times are
medians, with quartiles. Ratios are medians of the ratios within each round, because the clock of a
shared machine drifts. The number of threads is left as each library chose it.

Where the comparison is biased: jagcodec's authors wrote it, and chose the batches. One process
plays producer and consumer, so nothing here measures a network, a store, or a scheduler. Every
column is per-token and none is a Python object: TransferQueue 0.1.11 loses non-tensor columns, so
it could not bring them back. A frame per row is what the per-row encoder makes of jagged columns;
batches of few long rows suit it best, of many short rows worst. Lengths are long-tailed: with
every row equally long there is no padding to strip, and padded formats win; the sweep over fill
shows where.

    bench      the command: runs, prints, writes JSON and charts
    shapes     batches and the grid of their sizes
    sides      jagcodec and the floor
    peers      the other ways
    trips      processes, rounds, verification
    scaling    seconds of one core, for the model below, and its page
    scaling_model  what a step of many GPUs moves and waits for: a model, on paper
    soaks      many producers and an account of every batch
    reliability  the command that runs them for minutes, and its page
    pages      tables of pages that have a record of their own
    limits     the trip of few rows with a header that costs nothing
    stages     single steps of jagcodec beside the copies they stand for
    memory     peak memory of a trip
    bars       what the project asks of itself, and whether it is met
    bytes      what each option of `encode` saves, and what it costs
    small      messages of few rows beside pickle
    before     an earlier version of the library beside this one; before_worker, before_values
    house      lines and import chains of the library
    costs      what is counted instead of timed
    charts     PNG
    report     tables of README.md and docs/ from the JSON
    guard      a quick run beside stored figures
"""
