"""The main job, shown and checked: real rollout lengths, two processes, one socket.

A producer process packs GRPO batches and sends them over ZeroMQ; a trainer process decodes and
materializes them, compares every cell with what was padded, and writes a column back.
"""

from jagcodec.demo.report import DemoResult
from jagcodec.demo.run import intro, run_demo

__all__ = ["DemoResult", "intro", "run_demo"]
