"""Drafters that were trained, in simulated rollouts, and EAGLE3 on a published set-up."""
