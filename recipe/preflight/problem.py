"""What preflight can find wrong, each with a code."""

import difflib
from collections.abc import Iterable
from typing import Self

# The code, what is wrong, and what to do where the check does not know better.
TABLE = """\
ascend.patches | vllm-ascend would not call this project | run python scripts/patch.py apply
batch.metric | the reward gives no such metric to compare samples by | choose one that it gives
code.missing | verl would not find it | correct what the line names
config.override | Hydra refuses an override | correct what the line names
config.refused | this recipe does not run with it | set it to what docs/compatibility.md has
config.unknown_key | verl 0.9.1 does not know the key and would ignore it | remove it
config.value | a value is of another type or range than expected | change it
config.verl | verl refuses the config | correct what it names
data.missing | no such file | make it with bash scripts/prepare_data.sh, or point the key at your own
data.source | the recipe's reward does not know it | set reward.custom_reward_function.path to one of your own
data.wrong_file | verl cannot read it as rows of data_source, messages and reward_model | make it again
drafter.missing | there is no draft model | make it with sam distil, or point the key at your own
drafter.ranks | these ranks cannot run a draft model's passes together | set it to 1, or choose speculation=sam
drafter.unlike | it cannot draft for this model, these prompts or these ranks | choose another, or distil one
history.unusable | it cannot be written, is damaged or of another model | choose another speculation.history_path
machine.disk | too little disk for the checkpoints | free some, set run_dir, or lower trainer.max_actor_ckpt_to_keep
machine.memory | too little memory | stop other programs, take more nodes, or lower what the line names
machine.ports | taken, or no free port or range of ports | unset the variable, or stop what listens there
machine.shared_memory | too little shared memory | start the container with a larger --shm-size
memory.kv_cache | less than one longest response | raise rollout.tensor_model_parallel_size or gpu_memory_utilization
memory.training | training does not fit | raise the actor's parallel sizes, or lower its ppo_max_token_len_per_gpu
model.checksum | the SHA-256 is not the one that `hf download` noted | remove it, bash scripts/prepare_model.sh
model.damaged | not a whole safetensors file | remove it, bash scripts/prepare_model.sh goes on where a download stopped
model.missing | a file of the model is not there | bash scripts/prepare_model.sh, or point model.path at your own
model.tokenizer | the tokenizer does not load, or lays out no prompt | fetch the model again
package.version | this recipe is written for that version | install the pins of requirements/
ray.devices | fewer free devices in the Ray cluster than the run needs | bash scripts/start_ray_cluster.sh worker
ray.head | not the head of a Ray cluster that runs | bash scripts/start_ray_cluster.sh
ray.node | preflight cannot run there | install the project and the pins of requirements/ on that node
run_dir.changed | it would be another curve | set it as it was, choose another run_dir=, or add --accept-changes
run_dir.checkpoint | no whole checkpoint to go on from | put it back, or begin again with trainer.resume_mode=disable
run_dir.in_use | two runs would write the same files | wait for it, stop it, or choose another run_dir=
size.divides | the first must be a multiple of the second | change one
size.least | that is less than the run needs | raise it
variable.refused | processes of the run would stop at it, or not find what they need | unset it
vllm.arguments | vLLM refuses it | change it
"""
CODES = {code: (wrong, remedy) for code, wrong, remedy in (line.split(" | ") for line in TABLE.splitlines())}


class Problem(str):
    """The line that is printed: the value, what is wrong with it, what to do, and the code in brackets.

    Args:
        code: one of CODES.
        value: what was found, with its key where it has one.
        remedy: in place of the table's.

    Example:
        >>> print(Problem("config.value", "seed=-5: expected an integer from 0"))
        seed=-5: expected an integer from 0: a value is of another type or range than expected: change it [config.value]
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


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """What to do about a name that nothing knows; None: none of the known ones is like it."""
    close = difflib.get_close_matches(str(name), list(map(str, known)), 1)
    return f"did you mean {close[0]}?" if close else None


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
