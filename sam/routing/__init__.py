"""Which request starts where and when: a pure policy, for the router of a rollout and for the simulator."""
