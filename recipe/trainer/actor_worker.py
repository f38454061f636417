"""verl's training worker, with the sending end of the weight sync under a name of this run's own."""

from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker

from recipe.rollout.weight_sync import job_and_session, with_session


class SessionWorker(ActorRolloutRefWorker):
    """verl's worker, whose weight sync goes through a socket of this run's own."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        """verl's, then rename the socket."""
        super().init_model()
        if self._is_rollout:
            self.rollout.zmq_handle = with_session(self.rollout.zmq_handle, job_and_session())
