"""verl's synchronous V1 trainer with ordered groups and a record of the run on disk, beside what
recipe.sam_dapo.verl_plugin adds to every trainer of verl's."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import ray
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu

from recipe.sam_dapo.launch import routing, sharing
from recipe.sam_dapo.record import (
    LOG_PROBABILITIES,
    ROLLOUT,
    RUNNING,
    SAVING,
    STARTING_ENGINES,
    STARTING_LOOPS,
    UPDATE,
    VALIDATING,
    RunRecord,
)
from recipe.sam_dapo.rollout import prompt_uid
from recipe.sam_dapo.trainer.dynamic_sampling import DapoRounds
from sam.patching import put

LOOK_SECONDS = 2.0  # between looks at a rollout's progress, which cost an engine up to a step's preparation


@contextmanager
def named_in_order(step: int) -> Iterator[None]:
    """The groups of a validation, which verl names by chance, are named in the order of the data."""
    by_chance = trainer_base.uuid
    names = (prompt_uid(step, prompt) for prompt in itertools.count())
    put(trainer_base, "uuid", "name_validation", SimpleNamespace(uuid4=lambda: next(names)))
    try:
        yield
    finally:
        put(trainer_base, "uuid", "name_validation", by_chance)


class DapoTrainer(PPOTrainerSync):
    """verl's trainer with ordered prompts and a RunRecord; the algorithm is verl's."""

    def __init__(self, config):
        super().__init__(config)
        self.record = RunRecord(Path(config.run_dir))
        self._prompts_dispatched = 0
        self._next_look = 0.0

    def _setup(self):
        self.record.enter(STARTING_ENGINES)
        super()._setup()
        print(f"routing: {routing.describe(self.config)}", flush=True)
        print(f"speculation.sharing: {sharing.describe(self.config)}", flush=True)

    def fit(self, agent_loop_manager):
        """Train; the run's record says when it has finished.

        Engines end before their servers, which end with this process, and before the log of shared text: an engine that
        is still there calls that a failure.
        """
        from recipe.sam_dapo.rollout import server

        if isinstance(self.replay_buffer, DapoRounds):
            self.replay_buffer.on_wait = self._look
        super().fit(agent_loop_manager)
        self.record.enter("finished")
        with suppress(ray.exceptions.RayError):
            server.end_engines()

    def on_init_end(self):
        """verl's first weight sync, marked as a phase for the supervisor."""
        with self.record.weight_sync():
            super().on_init_end()
        self.record.enter(STARTING_LOOPS)

    def on_validate_begin(self):
        """Prompts of the held-out set are next."""
        self.record.enter(VALIDATING)
        super().on_validate_begin()

    def on_validate_end(self):
        """Training goes on."""
        super().on_validate_end()
        self.record.enter(RUNNING)

    def on_sample_begin(self):
        """A step's prompts have been dispatched."""
        self.record.enter(ROLLOUT)
        super().on_sample_begin()

    def on_sample_end(self):
        """Training begins."""
        super().on_sample_end()
        self.record.enter(LOG_PROBABILITIES)

    def _update_actor(self, batch, metrics):
        self.record.enter(UPDATE)
        return super()._update_actor(batch, metrics)

    def _save_checkpoint(self):
        self.record.enter(SAVING)
        super()._save_checkpoint()

    def _look(self, partition_id: str, done: int, prompts: int) -> None:
        """Let the screen know how far a rollout is, now and then."""
        from recipe.sam_dapo.rollout import server

        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        rollout = self.config.actor_rollout_ref.rollout
        samples = rollout.val_kwargs.n if partition_id == "val" else rollout.n
        self.record.show(done=done, all=prompts * samples, **server.progress())

    def on_step_begin(self):
        """Number the step's prompts from 0."""
        self._prompts_dispatched = 0
        super().on_step_begin()

    def _add_batch_to_generate(self):
        """A whole round of dynamic sampling at once, not train_batch_size prompts and then the rest."""
        if not isinstance(self.replay_buffer, DapoRounds):  # a user's sampler
            return super()._add_batch_to_generate()
        self._add_prompts_to_generate(self.replay_buffer.prompts_per_round(self.config.data.train_batch_size))

    def _submit_batch_to_rollout(self, batch) -> int:
        """verl's random group ids would make a step's order depend on chance; ours sort in dispatch order."""
        first = self._prompts_dispatched
        self._prompts_dispatched += len(batch)
        uids = [prompt_uid(self.global_steps, number) for number in range(first, self._prompts_dispatched)]
        tu.assign_non_tensor_stack(batch, "uid", uids)
        return super()._submit_batch_to_rollout(batch)

    def on_step_end(self):
        """verl's weight sync, marked as a phase for the supervisor."""
        with self.record.weight_sync():
            super().on_step_end()

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
        """verl's; then write the step's responses, engine steps and metrics to disk."""
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        if isinstance(self.replay_buffer, DapoRounds):
            self.record.write_rollouts(global_steps, self.replay_buffer.rows)
        for steps, _ in self.sam_steps[:1]:
            steps.save(self.record.directory, global_steps)
        self.record.append_metrics(global_steps, metrics)

    def _validate(self):
        """verl's; then write the responses to disk."""
        sampler = self.replay_buffer
        sampler.validated = []
        with named_in_order(self.global_steps):
            metrics = super()._validate()
        self.record.write_validation(self.global_steps, sampler.validated)
        if not self._prompts_dispatched:  # later validations are logged with their step's metrics
            self.record.append_metrics(self.global_steps, metrics)
        return metrics
