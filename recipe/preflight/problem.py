"""What preflight can find wrong, each with a code."""

import difflib
from collections.abc import Iterable
from typing import Self

# The code, what is wrong, and what to do where the check does not know better.
TABLE = """\
agent_loop.unknown | verl knows no such agent loop | name one that the line names
ascend.graph_mode | vllm-ascend would not start, or replay no graph | set what the line names
ascend.patches | vllm-ascend would not call this project | run python scripts/patch.py apply
batch.devices | the responses of a step do not divide among the devices | change one
batch.generation | a round must be able to fill the batch, and divide it without dynamic sampling | change one
batch.metric | the reward gives no such metric to compare samples by | choose one that it gives
batch.micro | a micro-batch does not divide the responses that it is taken from | change it
batch.mini | the batch is not a multiple of the mini-batch | change one
batch.samples | dynamic sampling compares the samples of a prompt | use 2 or more
code.missing | verl would not find it | correct what the line names
config.override | Hydra refuses an override | correct what the line names
config.ray_init | ray.init does not know the key | remove it
config.refused | this recipe does not run with it | set it to what docs/compatibility.md has
config.unknown_file | configs/ has no such file | choose one of those that the line names
config.unknown_key | verl 0.9.1 does not know the key and would ignore it | remove it
config.value | a value is of another type or range than expected | change it
config.verl | verl refuses the config | correct what it names
data.missing | no such file | make it with bash scripts/prepare_data.sh, or point the key at your own
data.source | the recipe's reward does not know it | set reward.custom_reward_function.path to one of your own
data.wrong_file | verl cannot read it as rows of data_source, messages and reward_model | make it again
drafter.kind | that is another kind of drafter | choose the other of draft_model and eagle3, or hybrid
drafter.plugin | vLLM would not load this project's plugin, which brings drafter and sampler | correct it
drafter.missing | there is no draft model | make it with python -m recipe.draft_model, or point the key at your own
drafter.ranks | these ranks cannot run a draft model's passes together | set it to 1, or choose speculation=sam
drafter.unlike | it cannot draft for this model, these prompts or these ranks | choose another, or distil one
environment.misspelt | nothing reads this variable | correct its name
history.unusable | it cannot be written, is damaged or of another model | choose another speculation.history_path
length.model | it is below the longest prompt and response | raise it
length.overlong_buffer | expected 1 to the longest response | change it
machine.disk | too little disk for the checkpoints | free some, set run_dir, or lower trainer.max_actor_ckpt_to_keep
machine.hccl_ports | expected auto, or ranges such as 60000-60050 of free ports | unset it
machine.memory | too little memory | stop other programs, take more nodes, or lower what the line names
machine.network_card | this node has no such network card | set it to one that the line names
machine.port | taken on this node, and a Ray head needs it | stop what listens there, or set PORT on all nodes
machine.shared_memory | too little shared memory | start the container with a larger --shm-size
machine.vllm_port | vLLM expects a number, Kubernetes sets this for a service called vllm | unset it
memory.kv_cache | less than one longest response | raise rollout.tensor_model_parallel_size or gpu_memory_utilization
memory.training | training does not fit | raise the actor's parallel sizes, or lower its ppo_max_token_len_per_gpu
model.checksum | the SHA-256 is not the one that `hf download` noted | remove it, bash scripts/prepare_model.sh
model.damaged | not a whole safetensors file | remove it, bash scripts/prepare_model.sh goes on where a download stopped
model.index | shards and index are of two models | fetch both again, bash scripts/prepare_model.sh
model.missing | a file of the model is not there | bash scripts/prepare_model.sh, or point model.path at your own
model.tokenizer | the tokenizer does not load | fetch the model again
package.engine | that engine is another device's | use the script in scripts/: .venv is for the CPU, .venv-cuda for GPUs
package.flash_attention | flash_attention_2 needs flash-attn, and splitting sequences needs both | set the other
package.megatron | Megatron's packages are not installed | see docs/cluster.md; training=fsdp2 does without
package.version | this recipe is written for that version | install the pins of requirements/
parallel.engine_kwargs | verl places its workers by a key of its own | remove it, set that one
parallel.expert | vLLM spreads experts over 1 or all devices of a replica | set it to one of these
parallel.megatron | Megatron's parallel sizes do not divide the devices | change one
parallel.rollout | the rollout's parallel sizes do not divide the devices | change one
ray.address | expected HOST:PORT of the Ray cluster's head, for example 10.0.0.1:6379 | set or unset it
ray.address_unset | a Ray cluster runs here and RAY_ADDRESS is not set | use the script in scripts/, or export it
ray.devices_taken | another run holds the other devices | wait for it or stop it
ray.no_answer | nothing answers there, Ray has ended or was never started | bash scripts/start_ray_cluster.sh
ray.no_head | no Ray runs on this node and RAY_ADDRESS is not set | bash scripts/start_ray_cluster.sh
ray.node | preflight cannot run there | install the project and the pins of requirements/ on that node
ray.nodes_missing | fewer nodes in the Ray cluster than the run needs | bash scripts/start_ray_cluster.sh worker
ray.not_head | this node is not the head of that Ray cluster | start the run on its head
ray.refused | the Ray cluster refuses the connection | start it again with scripts/start_ray_cluster.sh, or unset it
run_dir.changed | it would be another curve | set it as it was, choose another run_dir=, or add --accept-changes
run_dir.checkpoint | no whole checkpoint to go on from | put it back, or begin again with trainer.resume_mode=disable
run_dir.in_use | two runs would write the same files | wait for it, stop it, or choose another run_dir=
tokens.rollout | less than one step of full decoding | raise it
tokens.update | less than the longest sequence | raise it
vllm.arguments | vLLM refuses it | change it
weight_sync.bucket | the largest tensor must fit in it with this driver | raise it
weight_sync.driver | verl cannot ask the NPU's driver | check npu-smi info and CANN's set_env.sh
"""
CODES = {code: (wrong, remedy) for code, wrong, remedy in (line.split(" | ") for line in TABLE.splitlines())}


class Problem(str):
    """The line that is printed: the value, what is wrong with it, what to do, and the code in brackets.

    Args:
        code: one of CODES.
        value: what was found, with its key where it has one.
        remedy: in place of the table's.

    Example:
        >>> print(Problem("batch.samples", "actor_rollout_ref.rollout.n=1"))
        actor_rollout_ref.rollout.n=1: dynamic sampling compares the samples of a prompt: use 2 or more [batch.samples]
    """

    code: str
    value: str
    remedy: str | None

    def __new__(cls, code: str, value: str, remedy: str | None = None) -> Self:
        wrong, usual = CODES[code]
        made = super().__new__(cls, f"{value}: {wrong}: {remedy or usual} [{code}]")
        made.code, made.value, made.remedy = code, value, remedy
        return made

    def __getnewargs__(self) -> tuple[str, str, str | None]:
        return self.code, self.value, self.remedy  # nodes of a cluster send theirs pickled


def did_you_mean(name: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """What to do about a name that nothing knows; None: none of the known ones is as much like it."""
    close = difflib.get_close_matches(str(name), list(map(str, known)), 1, alike)
    return f"did you mean {close[0]}?" if close else None


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def table() -> str:
    """The codes as a table."""
    rows = [f"| `{code}` | {wrong} | {remedy} |" for code, (wrong, remedy) in CODES.items()]
    return "\n".join(["| code | what is wrong | what to do |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
