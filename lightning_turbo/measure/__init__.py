"""Interleaved measurement of fresh processes, shared by the benchmarks and ``lightning-turbo tune``."""

from lightning_turbo._machine import count_cores
from lightning_turbo.measure.ending import end_process
from lightning_turbo.measure.interleaved import LATE, InterleavedRounds, Interrupt, InterruptedRunError, new_row
from lightning_turbo.measure.machine import OtherLoad, computes_in_bfloat16, describe_machine
from lightning_turbo.measure.picture import Bar, draw_bars, why_no_picture
from lightning_turbo.measure.process import CAN_HOLD, Process, ProcessError
from lightning_turbo.measure.progress import Progress
from lightning_turbo.measure.report import markdown_table, print_lines, three_digits, write_json
from lightning_turbo.measure.round_timer import RoundTimer
from lightning_turbo.measure.statistics import interval_of, log_quotients, seconds_by_sweep
from lightning_turbo.measure.worker import Channel, SkippedError, open_channel, peak_bytes, serve

__all__ = [
    "CAN_HOLD",
    "LATE",
    "Bar",
    "Channel",
    "InterleavedRounds",
    "Interrupt",
    "InterruptedRunError",
    "OtherLoad",
    "Process",
    "ProcessError",
    "Progress",
    "RoundTimer",
    "SkippedError",
    "computes_in_bfloat16",
    "count_cores",
    "describe_machine",
    "draw_bars",
    "end_process",
    "interval_of",
    "log_quotients",
    "markdown_table",
    "new_row",
    "open_channel",
    "peak_bytes",
    "print_lines",
    "seconds_by_sweep",
    "serve",
    "three_digits",
    "why_no_picture",
    "write_json",
]
