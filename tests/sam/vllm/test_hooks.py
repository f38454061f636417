"""What the wires do in vLLM's own classes, without an engine."""

from types import SimpleNamespace

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from sam.vllm import hooks


def test_room_for_drafts_is_left_only_while_some_are_to_come(monkeypatch):
    """Whatever the scheduler's own table says of the next step, as it does from vLLM 0.24 on."""

    class Own(AsyncScheduler):
        num_sampled_tokens_per_step = 1
        use_v2_model_runner = False

        def __init__(self):
            self._spec_token_placeholders = [-1] * 3

    monkeypatch.setattr(Scheduler, "_update_after_schedule", lambda *_: None)
    monkeypatch.setattr(Scheduler, "update_from_output", lambda *_: {})
    hooks.schedule_wanted_drafts(Own)
    scheduler = Own()
    request = SimpleNamespace(is_prefill_chunk=False, use_structured_output=False, num_output_placeholders=0)
    scheduler.running = [request]
    scheduler.requests = {"request": request}
    scheduled = SimpleNamespace(
        scheduled_spec_decode_tokens={},
        num_scheduled_tokens={"request": 1},
        has_structured_output_requests=False,
        pending_structured_output_tokens=False,
    )
    for wanted in (0, 3):
        scheduled.num_spec_tokens_to_schedule = 3
        scheduler.update_from_output(scheduled, SimpleNamespace(**{hooks.PLACEHOLDERS: wanted}))
        scheduler._update_after_schedule(scheduled)
        assert len(request.spec_token_ids) == wanted
