"""What every test runs under: two threads, no network; and the embedded model."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

# Read once by torch, numba and huggingface_hub when they are first imported, so set before any
# test imports them; child processes inherit them. Importing torch here to call set_num_threads
# would cost the host tests, which run in milliseconds, seconds.
os.environ["OMP_NUM_THREADS"] = "2"
os.environ["NUMBA_NUM_THREADS"] = str(min(2, os.cpu_count() or 1))
os.environ["HF_HUB_OFFLINE"] = "1"
# Tests run several processes with threads of their own on few cores: threads that spin while they
# wait would take the cores from those that have work.
os.environ["GOMP_SPINCOUNT"] = "1000"

# A deadline per example would measure how busy the machine is.
hypothesis.settings.register_profile("minivllm", deadline=None)
hypothesis.settings.load_profile("minivllm")


@pytest.fixture(scope="session")
def embedded_dir() -> Path:
    """The embedded 135M model, as `find_checkpoint` finds it when no model is named."""
    from minivllm.checkpoint import find_checkpoint

    return find_checkpoint(None).path
