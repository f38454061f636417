"""What is tested with this recipe, what is taken with a warning and what is refused: one table, for every run.

`python -m recipe.preflight.compatibility` prints docs/compatibility.md.
"""

import platform
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, ListConfig, OmegaConf

from recipe.launch import versions
from recipe.preflight import ascend
from recipe.preflight.problem import Problem, did_you_mean
from sam.trained_drafter import settings_of

# The feature; its key, after the setting that it only counts with; what tests of this repository run with; what is
# taken with a warning, * for anything; what to say of the rest, which is refused. "config.json" is the model's.
TABLE = """\
device | trainer.device | cpu | cuda npu |
training engine | actor_rollout_ref.actor.strategy | fsdp2 | fsdp megatron | choose it with training=...
LoRA | actor_rollout_ref.model.lora_rank | 0 | * |
LoRA, Megatron's | actor_rollout_ref.model.lora.rank | 0 | * |
LoRA adapter | actor_rollout_ref.model.lora_adapter_path | null | * |
vision | config.json vision_config | null | * |
quantised weights | config.json quantization_config | null | * |
quantisation-aware training | actor_rollout_ref.actor.fsdp_config.qat.enable | false null | true |
multi-token prediction | actor_rollout_ref.model.mtp.enable_rollout | false | | speculation=... chooses the drafter
trainer of verl's | trainer.use_v1 | true | | the recipe's trainer is one of verl's V1
trainer mode | trainer.v1.trainer_mode | sync | | responses that go on after a weight sync are not supported yet
resuming | trainer.resume_mode | auto disable | resume_path |
resuming from | trainer.resume_mode=resume_path: trainer.resume_from_path | | *global_step_* |
learning rate | actor_rollout_ref.actor.optim.lr_scheduler_type | constant null | cosine |
advantage | algorithm.adv_estimator | grpo | gae gdpo gpg grpo_passk grpo_vectorized opo optimal_token_baseline \
reinforce_plus_plus reinforce_plus_plus_baseline remax rloo rloo_vectorized tir_optimal_token_baseline |
policy loss | actor_rollout_ref.actor.policy_loss.loss_mode | vanilla | bypass_mode cispo clip_cov dppo_kl dppo_tv dro \
geo_mean gpg gspo kl_cov sapo |
loss aggregation | actor_rollout_ref.actor.loss_agg_mode | token-mean | seq-mean-token-mean seq-mean-token-sum \
seq-mean-token-sum-norm |
critic | critic.enable | false null | true |
KL loss | actor_rollout_ref.actor.use_kl_loss | false | true |
KL loss, kind | actor_rollout_ref.actor.use_kl_loss=true: actor_rollout_ref.actor.kl_loss_type | | abs abs+ k1 k1+ \
k2 k3 k3+ kl kl+ low_var_kl low_var_kl+ mse |
KL in the reward | algorithm.use_kl_in_reward | false | true |
KL in the reward, kind | algorithm.use_kl_in_reward=true: algorithm.kl_penalty | | abs abs+ k1 k1+ k2 k3 k3+ kl kl+ \
low_var_kl low_var_kl+ mse |
rollout correction, weights | algorithm.rollout_correction.rollout_is | null | sequence token |
rollout correction, rejection | algorithm.rollout_correction.rollout_rs | null | * |
rollout correction, bypass | algorithm.rollout_correction.bypass_mode | false | true |
router replay in training | actor_rollout_ref.actor.megatron.router_replay.mode | disabled null | R2 R3 |
router replay in the rollout | actor_rollout_ref.rollout.enable_rollout_routing_replay | false | true |
distillation | distillation.enabled | false | true |
reward manager's source | reward.reward_manager.source | register | importlib |
reward manager | reward.reward_manager.source=register: reward.reward_manager.name | dapo | gdpo naive remote |
reward model | reward.reward_model.enable | false | true |
reward model's devices | reward.reward_model.enable=true: reward.reward_model.enable_resource_pool | | true | dynamic \
sampling needs rewards before a step's sampling ends
sandbox | reward.sandbox_fusion.url | null | * |
rollout engine | actor_rollout_ref.rollout.name | vllm | | the recipe replaces vLLM's drafter and sampler only
rollout mode | actor_rollout_ref.rollout.mode | async | | verl has removed all others
pipeline stages of a replica | actor_rollout_ref.rollout.pipeline_model_parallel_size | 1 | | verl refuses it
rollout nodes of their own | actor_rollout_ref.rollout.nnodes | 0 | | verl's synchronous trainer has none
quantised rollout | actor_rollout_ref.rollout.quantization | null | ascend fp8 torchao |
PD disaggregation | actor_rollout_ref.rollout.disaggregation.enabled | false | | verl's prefill and decode servers do \
not draft
server class | actor_rollout_ref.rollout.agent.custom_async_server.path | null | | verl does not read it
agent loop | actor_rollout_ref.rollout.agent.default_agent_loop | single_turn_agent | * |
multi-turn, tools | actor_rollout_ref.rollout.multi_turn.enable | false | true |
sampling | actor_rollout_ref.rollout.do_sample | true | | verl does not read it, temperature decides
sampling in validations | actor_rollout_ref.rollout.val_kwargs.do_sample | true | | verl does not read it, \
val_kwargs.temperature=0 is greedy
traces | actor_rollout_ref.rollout.trace.backend | null | mlflow trackio weave |
checkpoint engine | actor_rollout_ref.rollout.checkpoint_engine.backend | naive | kimi_ckpt_engine mooncake nccl nixl |
skipped rollouts | skip.rollout_tq.enable | false | | the recipe's sampler waits for responses that are generated
rounds at once | algorithm.filter_groups.max_inflight_gen_batches | 1 | | rounds of dynamic sampling follow each other
trainer and rollout together | actor_rollout_ref.hybrid_engine | true | | verl's synchronous trainer has no other way
KV pool | actor_rollout_ref.rollout.engine_kwargs.vllm.kv_transfer_config | null | | KV of old weights could be read \
from it
KV pool in the host's memory | actor_rollout_ref.rollout.engine_kwargs.vllm.kv_offloading_size | null | | KV of old \
weights could be read from it
drafter on Ascend | trainer.device=npu: speculation.method | ngram off sam suffix | | vllm-ascend's own draft models \
have no switch
column of the data source | data.reward_fn_key | data_source | | verl does not read it
truncation of prompts | data.truncation | left | error middle right |
profiler | global_profiler.tool | null | npu nsys precision_debugger torch torch_memory |
logger | trainer.logger | console wandb | clearml file mlflow rl_insight swanlab tensorboard trackio vemlp_wandb |
Python | package Python | 3.11.* | 3.12.* |
Arctic Inference | speculation.method=suffix: package arctic-inference | 0.1.1 | * | install requirements/peers.txt
verl | package verl | 0.9.1 | |
vLLM | package vllm | 0.23.0 | |
Ray | package ray | 2.60.0 | * |
transformers | package transformers | 5.5.4 | * |
torch, CPU | trainer.device=cpu: package torch | 2.11.0 | |
torch, CUDA | trainer.device=cuda: package torch | 2.11.0 | |
torch, Ascend | trainer.device=npu: package torch | 2.10.0 | |
torch-npu | trainer.device=npu: package torch-npu | | 2.10.0.post4 |
vllm-ascend | trainer.device=npu: package vllm-ascend | 0.23.0.post1 | |
CANN | trainer.device=npu: package CANN | | 9.* | install it, source its set_env.sh or set ASCEND_HOME_PATH
"""
PAGE = """\
# Compatibility

Every run, `--check` and preflight look these up before anything is started. What is tested, tests of this repository
run with; what is not is taken with a warning, `*` is any other value; what is in neither column is refused in one line.
[What has run where](../README.md#what-has-run-where) goes by device. This page is made from the table in
`recipe/preflight/compatibility.py`.

| feature | key or package | tested | accepted, not tested with this recipe | refused: all others |
|---|---|---|---|---|
"""


class Row(NamedTuple):
    """A line of the table."""

    feature: str
    when: str
    key: str
    tested: list[str]
    untested: list[str]
    remark: str

    @property
    def is_package(self) -> bool:
        return self.key.startswith("package ")

    def found(self, config: DictConfig) -> list[str]:
        """The key's value as the table writes it, of a list every one; none where the row does not concern a config."""
        when, _, needed = self.when.partition("=")
        if when and needed not in _words(OmegaConf.select(config, when)):
            return []
        where, _, name = self.key.partition(" ")
        if where == "package":
            return _words(_version(name))
        if where == "config.json":
            settings = settings_of(Path(config.actor_rollout_ref.model.path).expanduser())
            return _words(None if settings.get(name) is None else "there")
        return _words(OmegaConf.select(config, self.key))

    def has(self, value: str, known: list[str]) -> bool:
        """Whether a value is one of those; a package that is not installed never is."""
        return not (self.is_package and value == "null") and any(fnmatchcase(value, one) for one in known)

    def said(self, value: str) -> str:
        name = self.key.removeprefix("package ")
        return f"{name} {value}" if self.is_package else f"{name}={value}"

    def problem(self, value: str) -> Problem:
        known = self.tested + self.untested
        if self.is_package:
            found = self.said("is not installed" if value == "null" else value)
            return Problem("package.version", f"{found}, expected {' or '.join(known)}", self.remark or None)
        expected = (did_you_mean(value, known) if len(known) > 1 else None) or f"set it to {' or '.join(known)}"
        return Problem("config.refused", self.said(value), "; ".join(filter(None, (self.remark, expected))))


def _row(line: str) -> Row:
    feature, key, tested, untested, remark = (cell.strip() for cell in line.split("|"))
    when, _, key = key.rpartition(": ")
    return Row(feature, when, key, tested.split(), untested.split(), remark)


ROWS = [_row(line) for line in TABLE.splitlines()]


def _words(value: Any) -> list[str]:
    if isinstance(value, ListConfig | list):
        return [word for one in value for word in _words(one)]
    return ["null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)]


def _version(name: str) -> str | None:
    if name == "Python":
        return platform.python_version()
    return ascend.cann_version() if name == "CANN" else versions.installed(name)


def find_problems(config: DictConfig, of_packages: bool = False) -> Iterator[Problem]:
    """Values that the recipe does not run with, or packages that are not there in a version that it runs with."""
    for row in (row for row in ROWS if row.is_package is of_packages):
        for value in row.found(config):
            if not row.has(value, row.tested + row.untested):
                yield row.problem(value)


def find_warnings(config: DictConfig) -> Iterator[str]:
    """One line of all that is taken although no test runs with it."""
    found = [(row, value) for row in ROWS for value in row.found(config) if row.has(value, row.untested)]
    if taken := [row.said(value) for row, value in found if not row.has(value, row.tested)]:
        yield f"not tested with this recipe: {', '.join(taken)} (docs/compatibility.md)"


def page() -> str:
    """docs/compatibility.md."""
    lines = []
    for row in ROWS:
        key = f"{row.key.removeprefix('package ')} ({row.when})" if row.when else row.key.removeprefix("package ")
        cells = [" ".join(f"`{value}`" for value in values) for values in (row.tested, row.untested)]
        lines.append(f"| {row.feature} | {key} | {' | '.join(cells)} | {row.remark} |")
    return PAGE + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
