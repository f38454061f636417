"""Reads the runs that the report compares: run directories, and runs on a wandb server.

wandb 0.31 has no public reader of its own files. A run directory has the same figures in metrics.jsonl.
"""

import re
from pathlib import Path
from urllib.parse import urlsplit

from recipe.launch.environment import has_wandb_key
from recipe.report.runs import ReportError, Run

EXPECTED = (
    "expected a run directory of recipe.main_dapo (its run_dir), or a run on a wandb server as entity/project/run_id "
    "or its address (an offline folder of wandb without its run directory: upload it with `wandb sync` first)"
)
# Entity, project, id; what follows in an address is a view of the run.
ADDRESSES = (
    re.compile(r"https?://.*?([\w.-]+)/([\w.-]+)/runs/([\w-]+)(?:[/?#].*)?"),
    re.compile(r"([\w.-]+)/([\w.-]+)/(?:runs/)?([\w-]+)"),
)
HOSTED = ("wandb.ai", "coreweave.com")  # where wandb's own client goes without being told
NOT_JSON = ("NaN", "Infinity", "-Infinity")


def load_run(source: str) -> Run:
    """Read a run, whatever `source` names it by.

    Raises:
        ReportError: `source` is none of what EXPECTED says, cannot be read, or has not trained.
    """
    path = Path(source)
    # The run directory, or a folder of wandb in it: wandb writes wandb/offline-run-* there.
    for folder in (path, *path.absolute().parents[:3]) if path.exists() else ():
        if (folder / "metrics.jsonl").is_file():
            return Run.load(folder, is_whole=False)
    matches = [match for address in ADDRESSES if (match := address.fullmatch(source))]
    if path.exists() or not matches or source.startswith((".", "/")):
        raise ReportError(f"{source}: no metrics.jsonl there; {EXPECTED}: check the path")
    return load_online(source, "/".join(matches[0].groups()))


def load_online(source: str, address: str) -> Run:
    """A run on a wandb server, through wandb's public API; `address` is entity/project/run_id."""
    if not has_wandb_key():
        raise ReportError(
            f"{source}: no such folder, and no key to look for a run of that name on a wandb server; {EXPECTED}: check "
            "the path, or set WANDB_API_KEY or run `wandb login`"
        )
    import wandb

    url = urlsplit(source)
    own_server = url.netloc and not url.netloc.endswith(HOSTED)
    overrides = {"base_url": f"{url.scheme}://{url.netloc}"} if own_server else None
    try:
        found = wandb.Api(overrides=overrides, timeout=60).run(address)
        rows, config, name, date = list(found.scan_history()), dict(found.config), found.name, found.created_at
    except Exception as error:  # wandb's own, its service's, its HTTP library's: nothing that they share
        raise ReportError(
            f"{source}: no such folder, and wandb says: {' '.join(str(error).split()) or type(error).__name__}; "
            f"{EXPECTED}: check the spelling, and that the key may read the project"
        ) from error
    metrics: dict[int, dict[str, float]] = {}
    for row in rows:
        metrics.setdefault(int(row["_step"]), {}).update(numbers(row))
    method = (config.get("speculation") or {}).get("method")
    return Run(method or name, source, config, {"date": date}, metrics)


def numbers(row: dict) -> dict[str, float]:
    """The numbers of a history row without wandb's own keys, which begin with an underscore."""
    named = {key: value for key, value in row.items() if not key.startswith("_")}
    return {key: float(value) for key, value in named.items() if type(value) in (int, float) or value in NOT_JSON}
