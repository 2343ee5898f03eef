# TETRIS on a CPU, with the portable platform. From the repository: docker build -f docker/cpu.Dockerfile -t tetris-sglang-cpu .
#   docker run -p 127.0.0.1:30000:30000 tetris-sglang-cpu --model-path TARGET
FROM python:3.11-slim-bookworm

WORKDIR /opt/tetris-sglang
# What SGLang compiles at start-up, and what its wheels link.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ git libnuma1 && rm -rf /var/lib/apt/lists/*
COPY requirements.txt pyproject.toml README.md LICENSE NOTICE ./
COPY scripts/make_env.sh scripts/make_env.sh
COPY tetris_sglang tetris_sglang
RUN ./scripts/make_env.sh && .venv/bin/tetris-sglang check

ENV PATH=/opt/tetris-sglang/.venv/bin:$PATH
EXPOSE 30000
ENTRYPOINT ["python", "-m", "sglang.launch_server", "--host", "0.0.0.0", "--port", "30000", "--speculative-algorithm", "TETRIS"]
CMD ["--help"]
