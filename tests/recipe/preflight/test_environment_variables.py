"""Misspelt environment variables are found, right ones and other programs' are left alone."""

import os

import pytest

from recipe.preflight import unknown_names


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("HCCL_CONECT_TIMEOUT", "HCCL_CONNECT_TIMEOUT"),
        ("HCLL_EXEC_TIMEOUT", "HCCL_EXEC_TIMEOUT"),
        ("VLLM_LOGING_LEVEL", "VLLM_LOGGING_LEVEL"),
        ("VLLM_USE_V2_MODEL_RUNER", "VLLM_USE_V2_MODEL_RUNNER"),
        ("ASCEND_RT_VISIBLE_DEVICE", "ASCEND_RT_VISIBLE_DEVICES"),
        ("RAY_EXPERIMENTAL_NOSET_ASCEND_VISIBLE_DEVICES", "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"),
        ("TASK_QUEUE_ENABLED", "TASK_QUEUE_ENABLE"),
    ],
)
def test_a_misspelt_name_is_found(misspelt, meant):
    (problem,) = unknown_names.variable_problems(environment={misspelt: "1"})
    assert (problem.code, problem.value, problem.remedy) == ("environment.misspelt", misspelt, f"did you mean {meant}?")


def test_right_names_and_others_are_left_alone():
    fine = ("HCCL_EXEC_TIMEOUT", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_CPU_KVCACHE_SPACE", "PATH", "HOME", "MY_VARIABLE")
    assert list(unknown_names.variable_problems(environment=dict.fromkeys(fine, "1"))) == []
    assert list(unknown_names.variable_problems(environment=os.environ)) == []


def test_what_the_scripts_set_is_known():
    from pathlib import Path

    script = (Path(__file__).parents[3] / "scripts" / "ascend_environment.sh").read_text()
    names = [line.split("=")[0].removeprefix("export ") for line in script.splitlines() if line.startswith("export ")]
    assert len(names) >= 7
    assert list(unknown_names.variable_problems(environment=dict.fromkeys(names, "1"))) == []
    for name in names:
        assert name in unknown_names.KNOWN or name == "VLLM_ASCEND_ENABLE_NZ"
