# Ascend A3 on verl's own image, which has Megatron-LM, MindSpeed and Triton for Ascend too:
#   docker build -f docker/verl-ascend-a3.Dockerfile -t sam-rollout-verl-a3 .
#
# Not built by anybody yet: where this is developed there is neither a container engine nor an aarch64 machine. The image has
# vllm-ascend from a branch: where `recipe.sam_dapo.patch` finds other bytes than the published ones it stops the build, and
# docker/ascend-a3.Dockerfile is the way. Likewise for versions that preflight refuses.
ARG VERL_IMAGE=quay.io/ascend/verl:v0.9.1-cann9.1.0-torch_npu2.10.0.post4-a3-ubuntu22.04-py3.12-vllm
FROM ${VERL_IMAGE}

COPY . /opt/sam_rollout
WORKDIR /opt/sam_rollout
# devlib stands in for the driver's libraries, which are mounted when the image runs.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN source /usr/local/Ascend/ascend-toolkit/set_env.sh && \
    source /usr/local/Ascend/nnal/atb/set_env.sh && \
    export LD_LIBRARY_PATH="$LD_LIBRARY_PATH:/usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/devlib" && \
    python3 -m pip install --no-cache-dir --no-deps . && \
    python3 -m recipe.sam_dapo.patch apply && \
    python docker/image_preflight.py dapo_qwen3_32b
