"""What sam.bench reads from the workers of all variants but stock."""

from typing import Any

from sam.record.engine_steps import PER_STEP, EngineSteps
from sam.vllm.bench.forced_text import ForcedTextExtension
from sam.vllm.step_recorder import StepRecorder

ERRORS = ("draft_errors", "draft_model_errors", "draft_model_invalid_drafts")
STAGES = ("forward_ms", "verify_ms", "draft_ms")
KEPT_COLUMNS = ("step_ms", "running", "prefilling", "drafted", "accepted", "emitted", *STAGES)


class BenchExtension(ForcedTextExtension):
    """Mixed into vLLM's worker; its methods are called through `collective_rpc`."""

    def sam_bench_attach(self, forces_text: bool) -> dict[str, Any]:
        """What drafts and verifies; from now on steps are recorded."""
        from sam.vllm import plugin

        status = plugin.installed(self.model_runner)
        if forces_text:
            self.sam_force_text([])  # before the recorder, which is to time it too
        StepRecorder.attach(self.model_runner)
        return {"drafter": status["drafter"], "verification": status["verification"]}

    def sam_bench_follow(self, request: str) -> None:
        """Note how a request's tokens come about from now on; its id may have vLLM's own ending."""
        FollowedRequest.attach(self.model_runner).start(request)

    def sam_bench_take(self, columns: bool) -> dict[str, Any]:
        """Counts and milliseconds of the steps since the last call.

        Args:
            columns: whether to add `columns`, each step's values by KEPT_COLUMNS, and `followed`, of FollowedRequest.
        """
        steps = StepRecorder.attach(self.model_runner).take()
        taken = counts_of(steps)
        if columns:
            values = {name: getattr(steps, name).astype(PER_STEP[name]).tolist() for name in KEPT_COLUMNS}
            rounded = {name: [round(value, 3) for value in column] for name, column in values.items()}
            taken |= {"columns": rounded, "followed": FollowedRequest.attach(self.model_runner).take()}
        return taken


def counts_of(steps: EngineSteps) -> dict[str, Any]:
    """Sums over steps, in tokens, verifications and milliseconds, `replays` as EngineSteps has it, and the errors
    of the drafter and of its draft model since the engine started."""
    return {
        "drafted": int(steps.drafted.sum()),
        "accepted": int(steps.accepted.sum()),
        "verify_steps": int(steps.position_steps.sum()),
        "verified_tokens": int(steps.position_emitted.sum()),
        "draft_errors": int(sum(steps.counters.get(name, 0) for name in ERRORS)),
        "replays": steps.replays(),
        **{name: round(float(getattr(steps, name).sum(dtype=float)), 3) for name in STAGES},
    }


class FollowedRequest:
    """How one request's tokens come about: the draft that each step verified for it, and the tokens that came out."""

    def __init__(self, runner):
        self._name: str | None = None
        self._id: str | None = None
        self._steps: list[tuple[list[int], list[int]]] = []
        self._scheduled = None
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self._execute_model, self._sample_tokens

    @classmethod
    def attach(cls, runner) -> "FollowedRequest":
        """Wrap a runner's two stages; attaching twice gives the same object."""
        if (existing := getattr(runner, "_sam_followed", None)) is None:
            existing = runner._sam_followed = cls(runner)
        return existing

    def start(self, name: str) -> None:
        """Follow the request whose id is `name`, or begins with it and a hyphen."""
        self._name, self._id, self._steps = name, None, []

    def take(self) -> list[tuple[list[int], list[int]]]:
        """For each step that gave tokens, the verified draft and the tokens; from now on no request is followed."""
        self._name, steps = None, self._steps
        return steps

    def _execute_model(self, scheduled, *arguments, **keywords):
        self._scheduled = scheduled
        return self._execute(scheduled, *arguments, **keywords)

    def _sample_tokens(self, *arguments, **keywords):
        output = self._sample(*arguments, **keywords)
        if self._name is not None and (sampled := getattr(output, "sampled_token_ids", None)):
            self._id = self._id or next(filter(self._is_followed, output.req_id_to_index), None)
            row = output.req_id_to_index.get(self._id)
            if row is not None and sampled[row]:
                draft = self._scheduled.scheduled_spec_decode_tokens.get(self._id, [])
                self._steps.append(([int(token) for token in draft], list(sampled[row])))
        return output

    def _is_followed(self, request_id: str) -> bool:
        return request_id == self._name or request_id.startswith(f"{self._name}-")
