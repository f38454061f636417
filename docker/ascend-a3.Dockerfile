# Ascend A3, aarch64: docker build -f docker/ascend-a3.Dockerfile -t sam-rollout-a3 .
#
# Not built by anybody yet: where this is developed there is neither a container engine nor an aarch64 machine.
# docs/cluster.md says what was done instead.

# The CANN that vllm-ascend 0.23.0.post1 is released with, and the Python of requirements/ascend.txt (vllm-ascend's own
# image has 3.12). A tag can be moved, and its digest could not be looked up from here: find it with `docker buildx
# imagetools inspect` and build with --build-arg CANN_IMAGE=quay.io/ascend/cann@sha256:...
ARG CANN_IMAGE=quay.io/ascend/cann:9.1.0-a3-ubuntu22.04-py3.11

# The platform is the cluster's, also where the image is built on another.
# hadolint ignore=DL3029
FROM --platform=linux/arm64 ${CANN_IMAGE}

# No USER: the driver gives /dev/davinci* to a group of the host's whose number no image can know, and CANN is root's.

ENV PIP_NO_CACHE_DIR=1
# After ENV, which makes hadolint forget it.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Compilers, git and libnuma are in the image. scripts/ascend_environment.sh preloads jemalloc where it finds it.
# No version: Ubuntu's archive keeps only the newest build of a package, so that a pin breaks the next build.
# hadolint ignore=DL3008
RUN apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends libjemalloc2 && \
    rm -rf /var/lib/apt/lists/*

WORKDIR /opt/sam_rollout
COPY requirements requirements
COPY docker/ascend-build.txt docker/

# The hashes cover a wheel for aarch64 and glibc 2.35 of every package, but for one source package in pure Python.
RUN python -m pip install --no-deps --require-hashes -r docker/ascend-build.txt && \
    python -m pip install --no-deps --require-hashes --no-build-isolation -r requirements/ascend.txt

# By itself vLLM would call itself 0.23.0+empty, which pip refuses for a pin of 0.23.0. Its setup imports torch, which
# would load torch_npu, which wants the driver.
RUN TORCH_DEVICE_BACKEND_AUTOLOAD=0 VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.23.0 \
    python -m pip install --no-deps --require-hashes --no-build-isolation --no-binary vllm -r requirements/vllm.txt

# vllm-ascend compiles its kernels for the die that it is told, as there is none to ask. This fetches makeself, with its
# hash, from gitcode.com.
RUN source /usr/local/Ascend/ascend-toolkit/set_env.sh && \
    source /usr/local/Ascend/nnal/atb/set_env.sh && \
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 SOC_VERSION=ascend910_9391 \
    python -m pip install --no-deps --require-hashes --no-build-isolation -r requirements/vllm-ascend.txt

COPY . .
RUN python -m pip install --no-deps --no-build-isolation -e . && \
    python -m recipe.sam_dapo.patch apply

# devlib stands in for the driver's libraries, which are mounted when the image runs. fsdp2, because Megatron-LM and
# MindSpeed, with which the config trains by default, are not in this image (docs/cluster.md).
RUN source /usr/local/Ascend/ascend-toolkit/set_env.sh && \
    source /usr/local/Ascend/nnal/atb/set_env.sh && \
    export LD_LIBRARY_PATH="$LD_LIBRARY_PATH:/usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/devlib" && \
    python docker/image_preflight.py dapo_qwen3_32b training=fsdp2

# The base image's entry point reads CANN's set_env.sh first.
CMD ["/bin/bash"]
