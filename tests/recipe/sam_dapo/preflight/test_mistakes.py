"""What a user may get wrong: each mistake alone on a node that is good otherwise, and the line that preflight has."""

import json
import re
import subprocess
import sys

import pytest

from recipe.sam_dapo import main_dapo, preflight
from recipe.sam_dapo.launch.config import CONFIGS, ConfigError
from recipe.sam_dapo.launch.versions import installed
from recipe.sam_dapo.patch import Patches
from recipe.sam_dapo.preflight import __main__ as doctor
from recipe.sam_dapo.preflight import compatibility, machine, settings, vllm_command
from sam.vllm import doors
from tests.recipe.sam_dapo.preflight.preflight_node import MESSAGES, composed, config_of, tiny, write_rows

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
ATTENTION, SPLIT = f"{MODEL}.override_config.attn_implementation", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
CUDA = ("device=cuda", "training=fsdp2", "trainer.n_gpus_per_node=16", f"{ATTENTION}=flash_attention_2")
SHARD, CANN = "model-00001-of-00002.safetensors", "cann/aarch64-linux/ascend_toolkit_install.info"

# What is said, of what the overrides set.
OVERRIDES = [
    ("[model.missing]", f"{MODEL}.path=Qwen/Qwen3-32B"),
    ("train_files=nowhere.parquet: no such file", "data.train_files=nowhere.parquet"),
    ("data.val_files=None: no such file", "data.val_files=[]"),
    ("train_batch_size=31, actor.ppo_mini_batch_size=32: the first must be", "data.train_batch_size=31"),
    ("train_batch_size x rollout.n=512, devices=14", "trainer.n_gpus_per_node=7"),
    ("_size x data_parallel_size=6: ", f"{ROLLOUT}.tensor_model_parallel_size=6"),
    ("tensor x pipeline x context=", f"{ACTOR}.megatron.context_parallel_size=3"),
    ("data.gen_batch_size=4: expected at least 32", "data.gen_batch_size=4"),
    ("dynamic sampling, which compares a prompt's samples", f"{ROLLOUT}.n=1"),
    ("the longest prompt and response: raise it", f"{ACTOR}.ppo_max_token_len_per_gpu=9216"),
    ("a step of full decoding: raise it [size.least]", f"{ROLLOUT}.max_num_batched_tokens=256"),
    ("[memory.kv_cache]", f"{ROLLOUT}.tensor_model_parallel_size=1"),
    ("[memory.training]", f"{ACTOR}.megatron.tensor_model_parallel_size=1"),
    ("KV of old weights could be read", f"+{VLLM}.kv_transfer_config.kv_connector=AscendStoreConnector"),
    ("vllm-ascend's own draft models have no switch", "speculation.method=hybrid", "speculation.draft_model=/x"),
    ("verl does not read it, temperature decides", f"{ROLLOUT}.do_sample=false"),
    ("in spite of val_only: set it to true", "trainer.val_only=true", "trainer.val_before_train=false"),
    ("it does not see split sequences", *CUDA, f"{ATTENTION}=sdpa", f"{SPLIT}=2"),
    ("verl's V1 trainer does not read it", "custom_reward_function.path=a.py"),
    (f"{ACTOR}.use_kl_loss=ture: expected true or false", f"{ACTOR}.use_kl_loss=ture"),
]
# And what spoils the node.
SPOILT = [
    ("1 of 2 shards of model", lambda node: (node.folder / "model" / SHARD).unlink()),
    ("vllm=0.24.0: expected 0.23.0", lambda node: node.versions.update(vllm="0.24.0")),
    ("vllm=0.22.1: expected 0.2[3-9].* or", lambda node: node.versions.update(vllm="0.22.1"), *CUDA),
    ("CANN=8.3.RC1: expected 9.*", lambda node: (node.folder / CANN).write_text("version=8.3.RC1\n")),
    ("CANN=None: expected 9.*: install it", lambda node: node.env("ASCEND_HOME_PATH", "/nowhere")),
    ("[ascend.patches]", lambda node: node.set(Patches, "state", "published")),
    ("VLLM_PLUGINS=ascend: ", lambda node: node.env("VLLM_PLUGINS", "ascend"), *CUDA),
    ("VLLM_PORT=tcp://", lambda node: node.env("VLLM_PORT", "tcp://10.0.0.1:8000")),
    ("--shm-size=5g or more [machine.shared_memory]", lambda node: node.free.update(shared=0.06)),
    ("2 checkpoints of 427 GiB", lambda node: node.free.update(disk=500.0)),
    ("[machine.memory]", lambda node: node.free.update(memory=100.0)),
]
MISTAKES = [(said, lambda node: None, *overrides) for said, *overrides in OVERRIDES] + SPOILT


@pytest.mark.parametrize("row", MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_one_line(node, row):
    said, spoil, *overrides = row
    spoil(node)
    config = node.config(*overrides)
    # Of a CPU's environment torch and vLLM's build are another device's.
    found = [one for one in preflight.find_problems(config) if not one.startswith(("torch=", "vLLM's build="))]
    assert 1 <= len(found) <= 3 and any(said in one for one in found), found
    assert not any("\n" in one for one in found)


def test_a_good_node_has_no_problem_and_no_config_of_the_recipes_is_refused(node):
    assert list(preflight.find_problems(node.config())) == []
    for name in sorted(path.stem for path in CONFIGS.glob("dapo_*.yaml")):
        config = composed(name)
        found = [one for find in (compatibility.values, settings.keys, settings.sizes) for one in find(config)]
        assert found == list(compatibility.warnings(config)) == [], name


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"prompt": None}, "no column prompt"),
        ({"prompt": [], "data_source": [], "reward_model": []}, "no rows"),
        (None, "Parquet"),
    ],
)
def test_a_file_of_data_that_verl_could_not_read_is_one_line(assets, columns, said):
    file = assets / "train.parquet"
    write_rows(file, **columns) if columns else file.write_text("no Parquet")
    (found,) = settings.data(tiny(assets))
    assert f"data.train_files={file}: " in found and said in found and "[data.wrong_file]" in found
    for split in ("train", "val"):
        write_rows(assets / f"{split}.parquet", prompt=None, question=[MESSAGES])
    assert list(settings.data(tiny(assets, "data.prompt_key=question"))) == []


def test_assets_are_made_by_the_configs_own_command_or_still_to_be_built(tmp_path):
    config = tiny(tmp_path / "none")
    with pytest.raises(ConfigError) as raised:
        preflight.check(config)
    said = str(raised.value).splitlines()
    assert len(said) == 3 and all(f"tiny.assets --output {tmp_path}/none [" in line for line in said)
    preflight.check(config, files=False)


def test_what_users_bring_in_place_of_what_repeats_is_warned_of():
    sampler = "trainer.v1.sampler.custom_sampler.path"
    (said,) = compatibility.warnings(config_of("dapo_tiny_cpu", f"{sampler}=mine.py"))
    assert said.startswith(f"{sampler}=mine.py: ") and said.endswith("runs need not repeat")


IMPORTS = """
import sys
from recipe.sam_dapo import main_dapo, preflight
from recipe.sam_dapo.launch.config import compose_config

assert main_dapo.main(["--config-name", "dapo_tiny_cpu", "speculation=foo"]) == 2
list(preflight.find_problems(compose_config("dapo_tiny_cpu", [f"assets={sys.argv[1]}"])))
print(*{"ray", "torch", "transformers", "verl", "vllm"} & set(sys.modules))
"""


def test_a_start_checks_everything_before_it_imports_what_takes_long(assets):
    ended = subprocess.run([sys.executable, "-c", IMPORTS, assets], capture_output=True, text=True, check=True)
    assert ended.stdout == "\n" and ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1


def test_the_doctor_says_what_is_wrong_and_what_a_run_consists_of(node, capsys, monkeypatch):
    """On a laptop without what needs the device; with it on every node of the cluster."""
    node.set(vllm_command, "what_verl_and_vllm_say", lambda config: ["verl's words"])
    node.set(machine, "ray_cluster", lambda config, find: [])
    node.set(doctor, "compose_config", lambda name, overrides: node.config(*overrides))
    node.env("RAY_ADDRESS", "auto")
    assert doctor.main(["--config-name", "dapo_qwen3_32b"]) == 2
    printed = capsys.readouterr().out
    assert printed.startswith("✓ device\n✓ keys\n") and printed.endswith("\n1 problem\n")
    assert "\n✗ verl's words\n✓ nodes\n" in printed
    assert "2 nodes x 16 npu devices; rollout: 4 replicas of 8, with up to 128 requests" in printed
    for part in ("\nrouting: ", "; sharing: ", "\nrollout, a die of 64 GiB: ", "optimizer", "a checkpoint has 427 GiB"):
        assert part in printed
    assert doctor.main(["--config-name", "dapo_qwen3_32b", "--json"]) == 2
    said = json.loads(capsys.readouterr().out)
    assert said["problems"] == ["verl's words"] and all(f"\n{note}\n" in printed for note in said["notes"])


def test_without_its_device_the_doctor_and_a_check_say_so_first_and_find_as_much(node, capsys, monkeypatch):
    node.set(vllm_command, "what_verl_and_vllm_say", lambda config: [])
    for module in (doctor, main_dapo):
        node.set(module, "compose_config", lambda name, overrides: node.config(*overrides))
    node.set(machine, "has_device", lambda device: False)
    monkeypatch.delenv("ASCEND_HOME_PATH")
    words = ["--config-name", "dapo_qwen3_32b", "data.train_files=/nowhere"]
    assert doctor.main(words) == 2
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("✗ no npu device here") and "on a CPU add scale=smoke" in printed[0]
    found = [line.removeprefix("✗ ") for line in printed if line.startswith("✗ ")]
    assert len(found) == 2 and printed[-1] == "2 problems"
    assert main_dapo.main([*words, "--check"]) == 2
    *checked, count = capsys.readouterr().err.splitlines()
    assert checked == [f"error: {line}" for line in found] and count.startswith("2 problems; sam doctor ")


QUIET = """
import sys
from recipe.sam_dapo.preflight import __main__ as doctor
print("code", doctor.main(["--config-name", "dapo_tiny_cpu", f"assets={sys.argv[1]}"]))
"""


def test_nothing_that_verl_and_vllm_print_is_shown(assets):
    ended = subprocess.run([sys.executable, "-c", QUIET, assets], capture_output=True, text=True, check=True)
    found = [line for line in ended.stdout.splitlines() if line.startswith(("✓ ", "✗ "))]
    notes = ended.stdout.splitlines()[len(found) :]
    assert len(found) > 8 and len(notes) == 5, ended.stdout  # three about the run, the count, the code
    assert all(re.fullmatch(r"[\w ]+: \d+ s", line) for line in ended.stderr.splitlines()), ended.stderr


def test_without_a_config_it_says_what_the_environment_has(capsys, monkeypatch):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert doctor.main([]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("no accelerator here: bash scripts/run_dapo_tiny_cpu.sh ") and len(lines) <= 20
    (others,) = (line for line in lines if line.startswith("device cpu; commit "))
    assert f"; ray {installed('ray')}; " in others and "; vllm " not in others
    assert {"✓ vllm: 0.24.0", "✓ plugin sam: installed", "✓ VLLM_USE_V2_MODEL_RUNNER: not set"} <= {*lines}
    first, second = (len(doors.DOORS[group]) for group in ("first", "second"))
    assert f"✓ vLLM's doors, first: {first} of {first}" in lines
    assert f"✓ vLLM's doors, second: {second} of {second}" in lines
    assert doctor.main(["--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["problems"] == [] and said["environment"]["vllm"] == "0.24.0"
    monkeypatch.setattr(doors, "missing", lambda group: ["file.py gone()"] if group == "first" else [])
    assert doctor.main([]) == 2
    assert "\n✗ this vLLM has no file.py gone(), which speculation needs: install " in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "yes")
    assert doctor.main([]) == 2
    assert "\n✗ VLLM_USE_V2_MODEL_RUNNER=yes: expected 0 or 1: " in capsys.readouterr().out
