"""The texts of a prompt's samples, shared between the replicas of a run (docs/how_it_works.md)."""
