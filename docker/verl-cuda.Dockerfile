# CUDA, x86-64, on verl's own image for vLLM 0.24: docker build -f docker/verl-cuda.Dockerfile -t sam-rollout-verl .
#
# Not built by anybody yet: where this is developed there is no container engine. The image has what verl 0.9.1 needs, and no
# verl. A tag can be moved: its digest could not be looked up from here.
ARG VERL_IMAGE=verlai/verl:vllm024.dev2
FROM ${VERL_IMAGE}

COPY . /opt/sam_rollout
WORKDIR /opt/sam_rollout
RUN python3 -m pip install --no-cache-dir --no-deps verl==0.9.1 . && \
    python docker/image_preflight.py dapo_qwen3_8b_cuda
