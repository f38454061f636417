"""verl looks every two seconds whether enough responses have ended: a tiny model may have written all by then."""

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync


class Impatient(ReplayBufferAsync):
    def __init__(self, **settings):
        super().__init__(poll_interval=0.2, **settings)
