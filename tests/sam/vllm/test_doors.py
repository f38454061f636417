"""What of vLLM this project needs, and what is said of a vLLM that lacks some of it or that nobody has tested."""

import importlib.util
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.v1.worker.worker_base import WorkerWrapperBase

from sam.vllm import doors, patches, plugin

VLLM = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """The files with doors of the installed vLLM, to be changed; they are looked at in its place."""
    for file in {door.split(" ")[0] for group in doors.DOORS.values() for door in group}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(VLLM / file, tmp_path / file)
    monkeypatch.setattr(doors, "_folder", lambda: tmp_path)
    monkeypatch.setattr(doors, "missing", doors.missing.__wrapped__)
    return tmp_path


def change(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def test_the_installed_vllm_has_every_door_of_its_first_runner():
    assert [doors.missing(group) for group in ("plugin", "first", "cpu")] == [[], [], []]


@pytest.mark.parametrize(
    ("group", "file", "before", "after", "door"),
    [
        ("first", "v1/worker/gpu_model_runner.py", "def _sample(", "def _draw(", "GPUModelRunner._sample(logits, "),
        ("first", "v1/worker/gpu_model_runner.py", "logits: torch.Tensor | None,\n        spec_decode_metadata",
         "spec_decode_metadata", "GPUModelRunner._sample(logits, spec_decode_metadata)"),
        ("first", "v1/worker/gpu_model_runner.py", "self.use_async_spec_decode =", "use_async =",
         "GPUModelRunner.use_async_spec_decode"),
        ("first", "v1/core/sched/output.py", "    scheduled_spec_decode_tokens:", "    drafts:",
         "SchedulerOutput.scheduled_spec_decode_tokens"),
        ("cpu", "model_executor/layers/utils.py", "def dispatch_cpu_unquantized_gemm(", "def dispatch(",
         "dispatch_cpu_unquantized_gemm(layer, remove_weight)"),
    ],
)  # fmt: skip
def test_a_door_that_is_gone_or_has_other_arguments_is_named_in_one_line(copied, group, file, before, after, door):
    change(copied / file, before, after)
    with pytest.raises(ValueError, match="which speculation needs: install vLLM 0.23 to ") as raised:
        doors.check("plugin", group)
    assert f"this vLLM has no {file} {door}" in str(raised.value) and "\n" not in str(raised.value)


def test_a_vllm_without_a_door_is_refused_where_speculation_is_configured_and_left_alone_elsewhere(copied):
    change(copied / "v1/worker/gpu_model_runner.py", "def sample_tokens(", "def sample_all(")
    made = []
    for additional, refused in (({}, False), ({"speculation": {}}, True)):
        config = SimpleNamespace(
            additional_config=additional,
            speculative_config=SimpleNamespace(method="custom_class", model="", num_speculative_tokens=3),
            model_config=SimpleNamespace(is_hybrid=False, is_attention_free=False),
            use_v2_model_runner=False,
        )
        wrapper = SimpleNamespace(vllm_config=config)
        if refused:
            with pytest.raises(ValueError, match=r"has no .* GPUModelRunner.sample_tokens\(\)"):
                plugin._init_device(made.append, wrapper)
        else:
            plugin._init_device(made.append, wrapper)
    assert len(made) == 1


def test_a_vllm_without_the_plugins_own_doors_is_left_alone_and_named_once(copied, monkeypatch, caplog):
    (copied / "v1/worker/worker_base.py").unlink()
    monkeypatch.setattr(patches, "wrap", None)
    plugin.register()
    plugin.register()
    assert caplog.text.count("no v1/worker/worker_base.py WorkerWrapperBase.init_device()") == 1
    assert WorkerWrapperBase.init_device.__name__ == "init_device"


def test_a_vllm_that_nobody_has_tested_works_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr("vllm.__version__", "0.99.1")
    for _ in range(2):
        doors.check("plugin", "first")
    assert caplog.text.count("vLLM 0.99.1: not tested with this project; all that it needs of vLLM is there") == 1


def test_the_tested_versions_are_those_of_the_table():
    page = (Path(__file__).resolve().parents[3] / "docs" / "compatibility.md").read_text()
    passed = re.findall(r"^\| (\d+\.\d+)\.\d+ \|[^|]+\|[^|]+\| \d+/\d+, ", page, re.MULTILINE)
    assert passed and tuple(dict.fromkeys(passed)) == doors.TESTED
