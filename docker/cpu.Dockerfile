# The quickstart on a CPU, x86-64: docker build -f docker/cpu.Dockerfile -t sam-rollout-cpu .
#
# Not built by anybody yet: where this is developed there is no container engine. Its steps were once executed as a
# script; docs/cluster.md says what that shows.

# A tag can be moved, and its digest could not be looked up from here. To pin it, find it with `docker buildx imagetools
# inspect` and build with --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.11.15-slim-bookworm

# requirements/cpu.txt is resolved for x86-64 alone.
# hadolint ignore=DL3029
FROM --platform=linux/amd64 ${PYTHON_IMAGE}

ENV PIP_NO_CACHE_DIR=1 UV_LINK_MODE=copy
# After ENV, which makes hadolint forget it.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# vLLM's CPU kernels link libnuma, and numba's threads, in vLLM's ngram drafter, libgomp; the packages bring the other
# libraries. Nothing is compiled, so there is no gcc; and no git, as no repository is copied.
# No version: Debian's archive keeps only the newest build of a package, so that a pin breaks the next build.
# hadolint ignore=DL3008
RUN apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends libgomp1 libnuma1 && \
    rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 rollout && \
    install --directory --owner=rollout --group=rollout /opt/sam_rollout
USER 1000
WORKDIR /opt/sam_rollout
COPY --chown=1000:1000 . .

# The packages' cache is the builder's: a second build downloads nothing, and the image does not carry it.
RUN --mount=type=cache,target=/home/rollout/.cache/uv,uid=1000,gid=1000 \
    source scripts/environment.sh && set_up_environment cpu
ENV PATH=/opt/sam_rollout/.venv/bin:$PATH

# With --build-arg TINY_ASSETS=1 the tiny model is trained here and not at the first start.
ARG TINY_ASSETS=0
RUN if [ "$TINY_ASSETS" = 1 ]; then python -m recipe.sam_dapo.tiny.assets --output outputs/tiny_assets; else mkdir -p outputs; fi

RUN python docker/image_preflight.py dapo_tiny_cpu

CMD ["bash", "scripts/quickstart.sh"]
