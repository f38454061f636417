"""What sharing a drafter among a prompt's samples brings: a run's own responses, replayed in each scope."""

from tqdm import tqdm

from recipe.report.runs import Run
from sam.record.responses import read_recording
from sam.replay.baselines import make_drafter
from sam.replay.round_robin import Replay, replay_group

SCOPES = ("request", "group")
POSITION_BIN = 32  # tokens, as in the engine's own histograms


def replay_scopes(run: Run) -> dict[str, Replay]:
    """Scope to replay. As in the engine, all samples of a prompt draft at once, always to the full length.

    Empty where the run has no responses on disk.
    """
    draft_length = run.speculation("num_speculative_tokens")
    if draft_length is None or not run.has_responses:
        return {}
    recordings = [read_recording(run.directory / "rollouts" / f"{step}.jsonl") for step in run.steps]
    total = len(SCOPES) * sum(recording.num_tokens for recording in recordings)
    results = {}
    with tqdm(total=total, unit="tok", desc="replaying the responses by scope", mininterval=1.0) as bar:
        for scope in SCOPES:
            drafter = make_drafter("sam", scope, draft_length)
            results[scope] = replay = Replay(draft_length, position_bin=POSITION_BIN)
            for step, recording in zip(run.steps, recordings, strict=True):
                for index, prompt in enumerate(recording.prompts):
                    what = f"{step}/{index}", prompt, recording.responses[index]
                    replay_group(replay, drafter, *what, "engine", bar.update)
    return results
