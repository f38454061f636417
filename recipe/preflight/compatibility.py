"""What is tested with this recipe, what is taken with a warning and what is refused: one table, for every run.

`python -m recipe.preflight.compatibility` prints docs/compatibility.md.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, ListConfig, OmegaConf

from recipe.launch import versions
from recipe.preflight.problem import Problem, did_you_mean
from sam.trained_drafter import settings_of

# The feature; its key, after the settings that it only counts with; what tests of this repository run with; what is
# taken with a warning, * for anything; what to say of the rest, which is refused. A key may be of the model's
# config.json, or of this machine: of a package, a module, vLLM's plugins or a variable. actor, model, rollout and vllm
# are sections as PLACES has them.
TABLE = """\
device | trainer.device | cpu | cuda npu |
training engine | actor.strategy | fsdp2 | fsdp megatron |
LoRA | model.lora_rank | 0 | * |
LoRA, Megatron's | model.lora.rank | 0 | * |
LoRA adapter | model.lora_adapter_path | null | * |
vision | config.json vision_config | null | * |
quantised weights | config.json quantization_config | null | * |
quantisation-aware training | actor.fsdp_config.qat.enable | false null | true |
multi-token prediction | model.mtp.enable_rollout | false | | speculation=... chooses the drafter
trainer of verl's | trainer.use_v1 | true | | the recipe's trainer is one of verl's V1
trainer mode | trainer.v1.trainer_mode | sync | | responses that go on after a weight sync are not supported yet
resuming | trainer.resume_mode | auto disable | resume_path |
resuming from | trainer.resume_mode=resume_path: trainer.resume_from_path | | *global_step_* |
learning rate | actor.optim.lr_scheduler_type | constant null | cosine |
advantage | algorithm.adv_estimator | grpo | gae gdpo gpg grpo_passk grpo_vectorized opo optimal_token_baseline \
reinforce_plus_plus reinforce_plus_plus_baseline remax rloo rloo_vectorized tir_optimal_token_baseline |
policy loss | actor.policy_loss.loss_mode | vanilla | bypass_mode cispo clip_cov dppo_kl dppo_tv dro geo_mean gpg gspo \
kl_cov sapo |
loss aggregation | actor.loss_agg_mode | token-mean | seq-mean-token-mean seq-mean-token-sum seq-mean-token-sum-norm |
critic | critic.enable | false null | true |
KL loss | actor.use_kl_loss | false | true |
KL loss, kind | actor.use_kl_loss=true: actor.kl_loss_type | | abs abs+ k1 k1+ k2 k3 k3+ kl kl+ low_var_kl low_var_kl+ \
mse |
KL in the reward | algorithm.use_kl_in_reward | false | true |
KL in the reward, kind | algorithm.use_kl_in_reward=true: algorithm.kl_penalty | | abs abs+ k1 k1+ k2 k3 k3+ kl kl+ \
low_var_kl low_var_kl+ mse |
rollout correction, weights | algorithm.rollout_correction.rollout_is | null | sequence token |
rollout correction, rejection | algorithm.rollout_correction.rollout_rs | null | * |
rollout correction, bypass | algorithm.rollout_correction.bypass_mode | false | true |
router replay in training | actor.megatron.router_replay.mode | disabled null | R2 R3 |
router replay in the rollout | rollout.enable_rollout_routing_replay | false | true |
distillation | distillation.enabled | false | true |
reward manager's source | reward.reward_manager.source | register | importlib |
reward manager | reward.reward_manager.source=register: reward.reward_manager.name | dapo | gdpo naive remote |
reward manager's file | reward.reward_manager.source=register: reward.reward_manager.module.path | null | | verl reads \
it with reward.reward_manager.source=importlib only
reward manager's own file | reward.reward_manager.source=importlib: reward.reward_manager.module.path | | *.py pkg://* |
reward manager's class | reward.reward_manager.module.name | custom_reward_manager | | verl reads reward_manager.name \
instead
reward model | reward.reward_model.enable | false | true |
reward model's devices | reward.reward_model.enable=true: reward.reward_model.enable_resource_pool | | true | dynamic \
sampling needs rewards before a step's sampling ends
sandbox | reward.sandbox_fusion.url | null | * |
rollout engine | rollout.name | vllm | | the recipe replaces vLLM's drafter and sampler only
rollout mode | rollout.mode | async | | verl has removed all others
pipeline stages of a replica | rollout.pipeline_model_parallel_size | 1 | | verl refuses it
rollout nodes of their own | rollout.nnodes | 0 | | verl's synchronous trainer has none
quantised rollout | rollout.quantization | null | ascend fp8 torchao |
PD disaggregation | rollout.disaggregation.enabled | false | | verl's prefill and decode servers do not draft
server class | rollout.agent.custom_async_server.path | null | | verl does not read it
agent loop | rollout.agent.default_agent_loop | single_turn_agent | * |
multi-turn, tools | rollout.multi_turn.enable | false | true |
sampling | rollout.do_sample | true | | verl does not read it, temperature decides
sampling in validations | rollout.val_kwargs.do_sample | true | | verl does not read it, val_kwargs.temperature=0 is \
greedy
traces | rollout.trace.backend | null | mlflow trackio weave |
checkpoint engine | rollout.checkpoint_engine.backend | naive | kimi_ckpt_engine mooncake nccl nixl |
skipped rollouts | skip.rollout_tq.enable | false | | the recipe's sampler waits for responses that are generated
rounds at once | algorithm.filter_groups.max_inflight_gen_batches | 1 | | rounds of dynamic sampling follow each other
trainer and rollout together | actor_rollout_ref.hybrid_engine | true | | verl's synchronous trainer has no other way
KV pool | vllm.kv_transfer_config | null | | KV of old weights could be read from it
KV pool in the host's memory | vllm.kv_offloading_size | null | | KV of old weights could be read from it
drafter on Ascend | trainer.device=npu: speculation.method | ngram off sam suffix | | vllm-ascend's own draft models \
have no switch
compilation, with graphs on Ascend | trainer.device=npu & rollout.enforce_eager=false & \
vllm.compilation_config.cudagraph_mode!=null NONE: vllm.compilation_config.mode | null | 3 VLLM_COMPILE vllm_compile \
none None | vllm-ascend captures graphs of compiled models only
ranks, with decode graphs on Ascend | trainer.device=npu & rollout.enforce_eager=false & \
vllm.compilation_config.cudagraph_mode=FULL_DECODE_ONLY & speculation.method=sam: rollout.data_parallel_size | 1 | | \
steps without drafts would run eager: set cudagraph_mode=FULL
drafter, with decode graphs on Ascend | trainer.device=npu & rollout.enforce_eager=false & \
vllm.compilation_config.cudagraph_mode=FULL_DECODE_ONLY: speculation.method | off sam | * | nearly every step runs \
eager: set cudagraph_mode=FULL
attention of split sequences | actor.fsdp_config.ulysses_sequence_parallel_size!=null 1: \
model.override_config.attn_implementation | | null flash_attention_2 |
dataset's class | data.custom_cls.path=null: data.custom_cls.name | null | | verl reads it with custom_cls.path only
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
vLLM's build | trainer.device=cpu: package vllm-build | cpu | | use the script in scripts/: .venv is for the CPU
vLLM's build, GPU | trainer.device=cuda: package vllm-build | | gpu | use the script in scripts/: .venv-cuda is for GPUs
torch, CPU | trainer.device=cpu: package torch | 2.11.0 | |
torch, CUDA | trainer.device=cuda: package torch | 2.11.0 | |
torch, Ascend | trainer.device=npu: package torch | 2.10.0 | |
torch-npu | trainer.device=npu: package torch-npu | | 2.10.0.post4 |
vllm-ascend | trainer.device=npu: package vllm-ascend | 0.23.0.post1 | |
CANN | trainer.device=npu: package CANN | | 9.* | install it, source its set_env.sh or set ASCEND_HOME_PATH
flash-attn | trainer.device=cuda & actor.strategy=fsdp fsdp2 & model.override_config.attn_implementation=null \
flash_attention_2: module flash_attn | | installed | install flash-attn, or set \
actor_rollout_ref.model.override_config.attn_implementation=sdpa
Megatron | actor.strategy=megatron: module megatron.core | | installed | see docs/cluster.md; training=fsdp2 does \
without
Megatron's bridge | actor.strategy=megatron & actor.megatron.vanilla_mbridge=false: module megatron.bridge | | \
installed | see docs/cluster.md; training=fsdp2 does without
mbridge | actor.strategy=megatron & actor.megatron.vanilla_mbridge=true: module mbridge | | installed | see \
docs/cluster.md; training=fsdp2 does without
MindSpeed | actor.strategy=megatron & trainer.device=npu: module mindspeed | | installed | see docs/cluster.md; \
training=fsdp2 does without
this project's plugin in vLLM | trainer.device=cpu cuda: plugin sam | installed | | pip install --no-deps -e . where \
vLLM runs
vLLM's plugins | trainer.device=cpu cuda: variable VLLM_PLUGINS | null sam | sam,* *,sam *,sam,* | add sam to it, or \
unset it
vLLM's model runner | trainer.device=cpu cuda: variable VLLM_USE_V2_MODEL_RUNNER | null 0 | | unset it
vLLM's port | variable VLLM_PORT | null | [0-9]* | unset it, which Kubernetes sets for a service called vllm
"""
PLACES = {name: f"actor_rollout_ref.{name}" for name in ("actor", "model", "rollout")}
PLACES["vllm"] = "actor_rollout_ref.rollout.engine_kwargs.vllm"
OF_MACHINE = ("module", "package", "plugin", "variable")
INSTALLED = "installed"
CONDITION = re.compile(r"(\S+?)(!?)=(.+)")
PAGE = """\
# Compatibility

Every run, `--check` and preflight look these up before anything is started. What is tested, tests of this repository
run with; what is not is taken with a warning, `*` is any other value; what is in neither column is refused in one line.
[What has run where](../README.md#what-has-run-where) goes by device. This page is made from the table in
`recipe/preflight/compatibility.py`.

| feature | key, package, module or variable | tested | accepted, not tested with this recipe | refused: all others |
|---|---|---|---|---|
"""


class Row(NamedTuple):
    """A line of the table."""

    feature: str
    when: str  # `key=word word` or `key!=word word`, joined by &: with which of the settings it counts
    kind: str  # one of OF_MACHINE, config.json, or nothing for a key of the config
    key: str
    tested: list[str]
    untested: list[str]
    remark: str

    @property
    def is_of_machine(self) -> bool:
        return self.kind in OF_MACHINE

    @property
    def place(self) -> str:
        """The key, after what it is of, which of packages and of the config's own keys goes without saying."""
        return self.key if self.kind in ("", "package") else f"{self.kind} {self.key}"

    def found(self, config: DictConfig) -> list[str]:
        """The key's value as the table writes it, of a list every one; none where the row does not concern a config."""
        for one in filter(None, self.when.split(" & ")):
            name, is_other, words = CONDITION.fullmatch(one).groups()
            if (_words(OmegaConf.select(config, name))[0] in words.split()) is bool(is_other):
                return []
        if self.is_of_machine:
            return _words(on_this_machine(self.kind, self.key))
        if self.kind:
            settings = settings_of(Path(config.actor_rollout_ref.model.path).expanduser())
            return _words(None if settings.get(self.key) is None else "there")
        return _words(OmegaConf.select(config, self.key))

    def has(self, value: str, known: list[str]) -> bool:
        """Whether a value is one of those; what is not installed never is."""
        is_missing = value == "null" and self.kind in ("module", "package", "plugin")
        return not is_missing and any(fnmatchcase(value, one) for one in known)

    def said(self, value: str) -> str:
        if self.kind == "config.json":
            return f"{self.place}={value}"
        return f"{self.key}{'=' if self.kind in ('', 'variable') else ' '}{value}"

    def problem(self, value: str) -> Problem:
        known = self.tested + self.untested
        if self.kind == "variable":
            return Problem("variable.refused", self.said(value), self.remark)
        if self.is_of_machine:
            found = self.said("is not installed" if value == "null" else value)
            expected = f", expected {' or '.join(known)}" * (known != [INSTALLED])
            return Problem("package.version", found + expected, self.remark or None)
        expected = (did_you_mean(value, known) if len(known) > 1 else None) or f"set it to {' or '.join(known)}"
        return Problem("config.refused", self.said(value), "; ".join(filter(None, (self.remark, expected))))


def _row(line: str) -> Row:
    line = re.sub(r"(?<!\S)(actor|model|rollout|vllm)(?=\.)", lambda found: PLACES[found[0]], line)
    feature, key, tested, untested, remark = (cell.strip() for cell in line.split("|"))
    when, _, key = key.rpartition(": ")
    kind, _, key = key.rpartition(" ")
    return Row(feature, when, kind, key, tested.split(), untested.split(), remark)


ROWS = [_row(line) for line in TABLE.splitlines()]


def _words(value: Any) -> list[str]:
    if isinstance(value, ListConfig | list):
        return [word for one in value for word in _words(one)]
    return ["null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)]


def on_this_machine(kind: str, name: str) -> str | None:
    """A variable's value, a package's version, or whether a module or plugin of vLLM is installed."""
    if kind == "variable":
        return os.environ.get(name)
    if kind == "module":
        return INSTALLED if is_importable(name) else None
    if kind == "plugin":
        plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
        return INSTALLED if any(one.name == name for one in plugins) else None
    if name == "vllm-build":  # the device that it is built for
        return {True: "cpu", False: "gpu"}.get(versions.engine_of_cpu())
    if name == "Python":
        return platform.python_version()
    return cann_version() if name == "CANN" else versions.installed(name)


def is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is not there
        return False


def cann_version() -> str | None:
    """The toolkit's version, from the file it is installed with."""
    root = Path(os.environ.get("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest"))
    for path in sorted(root.glob("*-linux/ascend_toolkit_install.info")):
        if found := re.search(r"^version=(.+)$", path.read_text(), flags=re.M):
            return found[1].strip()
    return None


def machine_problems(config: DictConfig) -> Iterator[Problem]:
    """Packages, modules and variables that this machine lacks, or has otherwise than the recipe runs with."""
    yield from _problems(config, of_machine=True)


def config_problems(config: DictConfig) -> Iterator[Problem]:
    """Values of the config that the recipe does not run with."""
    yield from _problems(config, of_machine=False)


def _problems(config: DictConfig, of_machine: bool) -> Iterator[Problem]:
    for row in (row for row in ROWS if row.is_of_machine is of_machine):
        yield from (row.problem(one) for one in row.found(config) if not row.has(one, row.tested + row.untested))


def find_warnings(config: DictConfig) -> Iterator[str]:
    """One line of all that is taken although no test runs with it."""
    found = [(row, value) for row in ROWS for value in row.found(config) if row.has(value, row.untested)]
    found = [(row, value) for row, value in found if not row.has(value, row.tested)]
    remarks = [f" ({row.remark})" * bool(row.remark and not row.is_of_machine) for row, _ in found]
    if taken := [row.said(value) + remark for (row, value), remark in zip(found, remarks, strict=True)]:
        yield f"not tested with this recipe: {', '.join(taken)} (docs/compatibility.md)"


def page() -> str:
    """docs/compatibility.md."""
    lines = []
    for row in ROWS:
        key = f"{row.place} ({row.when})" if row.when else row.place
        cells = [" ".join(f"`{value}`" for value in values) for values in (row.tested, row.untested)]
        lines.append(f"| {row.feature} | {key} | {' | '.join(cells)} | {row.remark} |")
    return PAGE + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
