"""What sharing a drafter among a prompt's samples brings: a run's own responses, replayed in each scope."""

from functools import partial

from tqdm import tqdm

from recipe.report.runs import Run
from sam.record.responses import by_prompt, join
from sam.replay.baselines import make_drafter
from sam.replay.round_robin import Replay, replay

SCOPES = ("request", "group")
POSITION_BIN = 32  # tokens, as in the engine's own histograms


def replay_scopes(run: Run) -> dict[str, Replay]:
    """Scope to replay. As in the engine, all samples of a prompt draft at once, always to the full length.

    Empty where the run has no responses on disk; steps that cannot be read are left out.
    """
    draft_length = run.speculation("num_speculative_tokens")
    if draft_length is None or not run.has_responses:
        return {}
    steps = [run.responses(step) for step in run.steps]
    recording = join([by_prompt((row.prompt_tokens, row.response_tokens) for row in rows) for rows in steps])
    if not recording.num_tokens:
        return {}
    total = len(SCOPES) * recording.num_tokens
    with tqdm(total=total, unit="tok", desc="replaying the responses by scope", mininterval=1.0) as bar:
        how = {"order": "engine", "progress": bar.update, "position_bin": POSITION_BIN}
        makers = {scope: partial(make_drafter, "sam", scope, draft_length) for scope in SCOPES}
        return {scope: replay(recording, make, draft_length, **how) for scope, make in makers.items()}
