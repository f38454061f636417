"""One problem that preflight has found: a line for the user, and a code to look it up by in docs/operations.md."""

from __future__ import annotations

# Every code, and what it means in one line; docs/operations.md lists them from here.
CODES = {
    "ascend.cann": "CANN is not there, or of another release than torch-npu",
    "ascend.lossy": "a setting of vllm-ascend changes the tokens that are sampled",
    "ascend.patches": "vllm-ascend's files are not the patched ones",
    "ascend.scheduling": "asynchronous scheduling and a drafter on the host exclude each other",
    "ascend.versions": "torch, torch-npu and vllm-ascend do not belong together",
    "batch.devices": "the responses of a step do not divide among the devices",
    "batch.generation": "a round of dynamic sampling is too small, or does not divide the batch",
    "batch.micro": "a micro-batch does not divide the responses that it is taken from",
    "batch.mini": "the training batch is not a multiple of the mini-batch",
    "batch.samples": "dynamic sampling needs two samples of a prompt or more",
    "config.engine": "the rollout engine is not vLLM",
    "config.name": "wandb takes texts as names",
    "config.ray_init": "ray.init does not know the key",
    "config.strategy": "the training strategy is unknown",
    "config.unknown_key": "verl does not know the key and would ignore it",
    "config.verl": "verl's own validation refuses the config",
    "data.missing": "a data file is not there",
    "data.wrong_file": "a data file is no parquet file, or lacks a column",
    "drafter.load": "the drafter or the sampler would not load",
    "environment.misspelt": "an environment variable is set that nothing reads",
    "length.model": "prompt and response are longer than the model's context",
    "length.overlong_buffer": "the overlong buffer is longer than a response",
    "machine.disk": "too little disk for the checkpoints",
    "machine.hccl_ports": "HCCL's ports are taken, or not written as ranges",
    "machine.memory": "too little memory",
    "machine.network_card": "a network card is named that this node does not have",
    "machine.port": "a port that Ray's head needs is taken",
    "machine.shared_memory": "too little shared memory",
    "machine.vllm_port": "VLLM_PORT is not a number",
    "memory.kv_cache": "weights leave no room for the KV cache of one longest response",
    "memory.training": "training does not fit on a device",
    "model.checksum": "a file's SHA-256 is not the one that was downloaded",
    "model.damaged": "a file of the model is damaged or cut off",
    "model.index": "the index names tensors or sizes that the shards do not have",
    "model.missing": "a file of the model is not there",
    "model.tokenizer": "the tokenizer does not load",
    "package.flash_attention": "flash-attn is not installed, or sequences are split without it",
    "package.megatron": "Megatron's packages are not installed",
    "package.suffix": "speculation=suffix needs arctic-inference",
    "package.version": "a package has another version than the recipe is written for",
    "parallel.engine_kwargs": "vLLM is told another parallel size than verl",
    "parallel.expert": "experts are spread over some of a replica's devices",
    "parallel.megatron": "Megatron's parallel sizes do not divide the devices",
    "parallel.rollout": "the rollout's parallel sizes do not divide the devices",
    "ray.address": "RAY_ADDRESS is not HOST:PORT",
    "ray.address_unset": "a Ray cluster runs here and RAY_ADDRESS is not set",
    "ray.devices_taken": "another run holds devices of the cluster",
    "ray.no_answer": "nothing answers at RAY_ADDRESS",
    "ray.no_head": "no Ray runs on this node",
    "ray.node": "preflight cannot run on a node of the cluster",
    "ray.nodes_missing": "fewer nodes are in the cluster than the run needs",
    "ray.not_head": "this node is not the head of the cluster",
    "ray.refused": "the cluster refuses the connection",
    "run_dir.in_use": "another run uses the directory",
    "tokens.rollout": "a step of the rollout has fewer tokens than full decoding needs",
    "tokens.update": "an update has fewer tokens than the longest sequence",
    "vllm.arguments": "vLLM refuses an argument; the line names its key",
    "weight_sync.bucket": "a tensor is larger than the bucket of the weight sync",
    "weight_sync.driver": "the NPU's driver is too old, or cannot be asked",
}


class Problem(str):
    """The line that is printed: the message with its value and remedy, and the code in brackets.

    Attributes:
        code: one of CODES.
        message: the line without the code.

    Example:
        >>> problem = Problem("ray.no_head", "no Ray runs here: start one")
        >>> print(problem)
        no Ray runs here: start one [ray.no_head]
    """

    code: str
    message: str

    def __new__(cls, code: str, message: str) -> Problem:
        if code not in CODES:
            raise KeyError(f"{code}: not in recipe.preflight.problem.CODES")
        made = super().__new__(cls, f"{message} [{code}]")
        made.code, made.message = code, message
        return made

    def __getnewargs__(self) -> tuple[str, str]:
        return self.code, self.message  # nodes of a cluster send theirs pickled


def table() -> str:
    """The codes as docs/operations.md lists them."""
    return "\n".join(["| code | meaning |", "|---|---|", *(f"| `{code}` | {text} |" for code, text in CODES.items())])


if __name__ == "__main__":
    print(table())
