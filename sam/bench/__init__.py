"""The name that `sam.tools.bench` had before 0.3.0, for scripts that run it."""
