"""The OpenAI server: `create_app` to mount in an app of one's own, `serve` to run by itself."""

from __future__ import annotations

from fastapi import FastAPI

from minivllm.config import EngineConfig, ServerConfig
from minivllm.engine import AsyncEngine

__all__ = ["ServerConfig", "create_app", "serve"]


def create_app(engine: AsyncEngine, config: ServerConfig | None = None) -> FastAPI:
    """An ASGI app over an engine that the caller starts and shuts down."""
    raise NotImplementedError


async def serve(engine_config: EngineConfig, server_config: ServerConfig | None = None) -> int:
    """Start an engine and serve it until SIGTERM or SIGINT; returns the exit status."""
    raise NotImplementedError
