"""What an operator reads: one line per finished request, one per start of the workers.

Both are plain functions from records to text, so that the caller decides where they go; the engine
sends them to the logger `minivllm`. Counters live with their owners (`scheduler.SchedulerStats`).
"""

from __future__ import annotations

from minivllm.batch import Ready
from minivllm.request import Request


def finished_line(request: Request) -> str:
    """How one request fared: waits, sizes, latencies, end.

    TTFT is counted from arrival; ITL is the mean time between the output's tokens.
    """
    stats = request.stats
    num_output = request.num_output_tokens
    parts = [
        f"request {request.id}: {request.finish_reason}",
        f"queue {_ms(stats.arrival_s, stats.scheduled_s)}",
        f"prompt {request.prompt_len} tokens ({stats.num_cached_tokens} cached)",
        f"output {num_output} tokens",
        f"preemptions {stats.num_preemptions}",
        f"restarts {stats.num_restarts}",
        f"TTFT {_ms(stats.arrival_s, stats.first_token_s)}",
        f"ITL {_ms(stats.first_token_s, stats.last_token_s, max(1, num_output - 1))}",
        f"end-to-end {_ms(stats.arrival_s, stats.finished_s)}",
    ]
    return ", ".join(parts)


def start_line(ready: Ready, block_size: int) -> str:
    """Seconds per phase of a start, and the memory plan."""
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in ready.phase_s.items())
    sizes = ready.memory_bytes.items()
    memory = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sizes)
    num_tokens = (ready.num_blocks - 1) * block_size
    return (
        f"worker ready (generation {ready.generation}): {phases}; {memory};"
        f" {ready.num_blocks} KV blocks for {num_tokens} tokens"
    )


def _ms(start_s: float | None, end_s: float | None, count: int = 1) -> str:
    if start_s is None or end_s is None:
        return "-"
    return f"{(end_s - start_s) / count * 1000:.1f} ms"
