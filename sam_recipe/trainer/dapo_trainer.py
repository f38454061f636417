"""verl's synchronous V1 trainer with ordered groups, rollout metrics and a record of the run on disk."""

from contextlib import suppress
from pathlib import Path

import ray
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.replica import RolloutReplicaRegistry

from sam.record.engine_steps import EngineSteps
from sam_recipe.launch import routing, sharing
from sam_recipe.record import RUNNING, STARTING_ENGINES, STARTING_WORKERS, VALIDATING, RunRecord, rollout_metrics
from sam_recipe.rollout import prompt_uid, router
from sam_recipe.rollout.client import RoutedClient
from sam_recipe.trainer.dynamic_sampling import DapoRounds
from sam_recipe.trainer.workers import SessionWorker

STOP_SECONDS = 10.0  # that the end of a run waits for engines to end


class DapoTrainer(PPOTrainerSync):
    """verl's trainer with ordered prompts, rollout metrics and a RunRecord; the algorithm is verl's."""

    def __init__(self, config):
        super().__init__(config)
        self.record = RunRecord(Path(config.run_dir))
        self._prompts_dispatched = 0
        self._training = False
        self._rollout_metrics: dict[str, float] = {}

    def _setup(self):
        self.record.enter(STARTING_WORKERS)
        RolloutReplicaRegistry.register("vllm", self._replica_class)  # what verl starts for rollout.name=vllm
        if routing.is_routed(self.config):
            router.write_config(self.config)
        super()._setup()
        print(f"routing: {routing.describe(self.config)}", flush=True)
        print(f"speculation.sharing: {sharing.describe(self.config)}", flush=True)
        if self.config.speculation.sharing == "replicas":
            from sam_recipe.rollout import server

            # An actor ends when nobody holds its handle.
            self._shared_log = server.share_text(sharing.needed_mib(self.config))

    def _replica_class(self) -> type:
        """Imported when the servers start, not before the workers do: vLLM takes seconds."""
        from sam_recipe.rollout.server import SpeculationReplica

        self.record.enter(STARTING_ENGINES)
        return SpeculationReplica

    def get_llm_client(self):
        """verl's, or the one that tells the recipe's router how long responses are."""
        return self.llm_server_manager.get_client(client_cls=RoutedClient if routing.is_routed(self.config) else None)

    def _init_resource_pool_mgr(self):
        super()._init_resource_pool_mgr()
        for role in {Role.ActorRollout, Role.ActorRolloutRef} & self.role_worker_mapping.keys():
            self.role_worker_mapping[role] = ray.remote(SessionWorker)

    def fit(self, agent_loop_manager):
        """Train; the run's record says when it has finished.

        Engines end before their servers, which end with this process, and before the log of shared text: an engine that
        is still there calls that a failure.
        """
        self.record.start(self.global_steps + 1)
        super().fit(agent_loop_manager)
        self.record.enter("finished")
        with suppress(Exception):
            ray.get([server.end_engine.remote() for server in self._all_servers()], timeout=STOP_SECONDS)

    def on_init_end(self):
        """verl's first weight sync, marked as a phase for the supervisor."""
        validates = self.config.trainer.get("val_before_train", True)
        with self.record.phase("weight_sync", then=VALIDATING if validates else RUNNING):
            super().on_init_end()

    def on_train_begin(self):
        """Steps begin, after the first validation."""
        self.record.enter(RUNNING)
        super().on_train_begin()

    def on_step_begin(self):
        """Number the step's prompts from 0."""
        self._training = True
        self._prompts_dispatched = 0
        self._collect_rollout()  # forgets what validation left
        router.take_metrics(self)
        router.read_history(self)
        super().on_step_begin()

    def _add_batch_to_generate(self):
        """A whole round of dynamic sampling at once, not train_batch_size prompts and then the rest."""
        if not isinstance(self.replay_buffer, DapoRounds):  # a user's sampler
            return super()._add_batch_to_generate()
        self._add_prompts_to_generate(self.replay_buffer.prompts_per_round(self.config.data.train_batch_size))

    def _submit_batch_to_rollout(self, batch) -> int:
        """verl's random group ids would make a step's order depend on chance; ours sort in dispatch order."""
        first = self._prompts_dispatched
        uids = [prompt_uid(self.global_steps, first + i) for i in range(len(batch))]
        self._prompts_dispatched += len(batch)
        tu.assign_non_tensor_stack(batch, "uid", uids)
        return super()._submit_batch_to_rollout(batch)

    def on_sample_end(self):
        """Write the step's responses and engine steps to disk, and keep its rollout metrics."""
        (replicas, seconds), rounds = self._collect_rollout(), 1
        if isinstance(self.replay_buffer, DapoRounds):
            step, seed = self.replay_buffer.last_step, self.config.actor_rollout_ref.rollout.seed
            rounds = step.rounds
            self.record.write_rollouts(self.global_steps, step.rows(seed, self.global_steps))
        replicas[0].save(self.record.directory, self.global_steps)
        threshold = int(self.config.speculation.batch_size_threshold)
        self._rollout_metrics = rollout_metrics(replicas, seconds, threshold, rounds) | router.take_metrics(self)
        super().on_sample_end()

    def on_step_end(self):
        """verl's weight sync, marked as a phase for the supervisor."""
        with self.record.phase("weight_sync"):
            super().on_step_end()

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        metrics.update(self._rollout_metrics)
        self.record.append_metrics(global_steps, metrics)

    def _validate(self):
        metrics = super()._validate()
        if not self._training:  # later validations are logged with their step's metrics
            self.record.append_metrics(self.global_steps, metrics)
        return metrics

    def _collect_rollout(self) -> tuple[list[EngineSteps], list[float]]:
        """Every replica's engine steps and busy seconds since the last call."""
        from sam_recipe.rollout import server

        return server.take_steps()

    def _all_servers(self) -> list:
        """Those of every machine of every replica."""
        return [server for replica in self.llm_server_manager.get_replicas() for server in replica.servers]
