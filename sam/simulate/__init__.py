"""A rollout's timeline from response lengths, acceptance and step costs: `python -m sam.simulate`, docs/bench.md."""
