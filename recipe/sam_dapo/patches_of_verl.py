"""Everything of verl 0.9.1, Ray, torch and Python's import that the recipe replaces, why, and when it can go.

`sam doctor --patches` prints these and those of vLLM and numba.
"""

import textwrap

from sam.patching import REGISTRY, Patch, register

# fmt: off
PATCHES = register({
    "join_trainers": Patch("verl.trainer.ppo.v1.trainer_base.PPOTrainer",
        "init get_llm_client step _validate _compute_metrics",
        "verl has a registry of servers, but none of what its trainers log or do when they have started.",
        "verl has one."),
    "follow_import": Patch("importlib's loader of verl.trainer.ppo.v1.trainer_base", "exec_module",
        "verl imports its plugins before its trainers, and calls none of them before a trainer starts.",
        "join_trainers can."),
    "count_busy_seconds": Patch("the AsyncLLM of verl's server", "generate",
        "verl's server keeps requests back between an interruption and the next weights: its own calls last longer "
        "than the engine works.", "vLLM or verl reports for how long an engine had requests."),
    "meet_at_own_port": Patch("verl.trainer.ppo.v1.trainer_base", "RayWorkerGroup",
        "verl 0.9.1 lets the kernel choose a free port for torch.distributed, closes it, and listens there seconds "
        "later, when Ray may have been given it: EADDRINUSE (https://github.com/verl-project/verl/issues/5889). Runs "
        "that start at once on a node seldom try the same port here.", "verl's trainer has a key for this argument."),
    "name_validation": Patch("verl.trainer.ppo.v1.trainer_base", "uuid",
        "verl names the groups of a validation by chance: its dump has the responses in another order each time.",
        "verl names them in the order of the data."),
    "name_job": Patch("ray.runtime_context.RuntimeContext", "get_job_id",
        "verl names the socket by which it hands weights to an engine after Ray's job, below /tmp "
        "(https://github.com/verl-project/verl/pull/6246), and every Ray counts its jobs from one: an engine would "
        "wait for ever, or get another run's weights.", "verl's name has the Ray session."),
    "drop_second_gloo": Patch("torch.distributed", "init_process_group",
        'verl asks for "cpu:gloo,cpu:gloo" when the device itself is the CPU; torch refuses a device named twice.',
        "verl asks for each device once."),
    "average_on_gloo": Patch("torch.distributed", "all_reduce",
        "gloo has no ReduceOp.AVG, which verl uses for the loss metric.", "gloo has it."),
    # While a config is checked; put back afterwards.
    "stop_before_engine": Patch("verl.workers.rollout.vllm_rollout.vllm_async_server", "build_cli_args_from_config",
        "verl writes an engine's arguments in the function that starts it.",
        "verl has a function for the arguments alone."),
    "look_in_this_process": Patch("vllm.model_executor.models.registry", "_run_in_subprocess",
        "vLLM looks at a model's class in a process that imports vLLM once more: ten seconds.",
        "vLLM keeps the answer."),
})
# fmt: on


def listed() -> str:
    """Every entry of the registry, as text."""
    from sam import jit  # noqa: F401 - registers numba's
    from sam.vllm import patches  # noqa: F401 - registers vLLM's

    lines = []
    for name, patch in REGISTRY.items():
        lines.append(f"{name}: {patch.targets} of {patch.owner}")
        for text in (patch.cause, f"Can go when {patch.can_go_when}"):
            lines.append(textwrap.fill(text, 120, initial_indent="    ", subsequent_indent="    "))
    return "\n".join(lines)
