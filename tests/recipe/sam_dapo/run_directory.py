"""A run's directory, written by hand."""

import json


def write_run(directory, config, metrics, responses, **versions):
    """Rows of metrics, and of each training step's responses."""
    (directory / "rollouts").mkdir(parents=True)
    (directory / "config.yaml").write_text(json.dumps(config))
    (directory / "versions.json").write_text(json.dumps({"verl": "0.9.1", **versions}))
    files = {"metrics": metrics, **{f"rollouts/{step}": rows for step, rows in responses.items()}}
    for name, rows in files.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory
