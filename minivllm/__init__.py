"""minivllm: a compact LLM inference engine.

These are the public names. None of them loads torch until a model is started in this process.
"""

from __future__ import annotations

from minivllm.config import EngineConfig
from minivllm.engine import AsyncEngine
from minivllm.llm import LLM
from minivllm.request import (
    CompletionOutput,
    Logprob,
    RepetitionDetection,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)

__all__ = [
    "LLM",
    "AsyncEngine",
    "EngineConfig",
    "SamplingParams",
    "RepetitionDetection",
    "RequestOutputKind",
    "RequestOutput",
    "CompletionOutput",
    "Logprob",
]
