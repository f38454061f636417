"""A rollout's timeline from response lengths, acceptance and step costs: `sam tune`, docs/bench.md."""
