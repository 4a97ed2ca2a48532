"""GRPO batches of real rollout lengths between two processes, every cell checked: `make demo`.

A producer process packs GRPO batches and sends them over ZeroMQ; a trainer process decodes and
materializes them, compares every cell with what was padded, and writes a column back.

``pip install 'jagcodec[zmq]'``, and from a checkout: ``python -m examples.grpo_demo``

    run        the two processes
    producer   what a rollout worker does at its write site
    trainer    what a trainer does at its fetch site
    batch      the batches, padded as a framework holds them
    check      comparing what arrived with what was padded
    report     what was measured
"""
