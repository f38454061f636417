"""What is drafted from once a session has gone on: its text, without the last token and the drafts behind its end."""

from types import SimpleNamespace

import numpy as np

from sam.drafting.drafter import Drafter
from sam.vllm.tracked_requests import TrackedRequests
from sam.vllm.v2 import followed_requests
from sam.vllm.v2.followed_requests import FollowedRequests
from tests.sam.stepping import draft, tokens

FIRST, ANSWER = [1, 2, 3], [4, 5, 60, 61]  # 5 is the last token, and 60 and 61 are drafts behind it
SECOND = [1, 2, 3, 4, 30, 31, 32, 33, 30]
GOES_ON = [32, 33, 30]  # behind one more 31
SAMPLING = SimpleNamespace(extra_args=None, max_tokens=2, all_stop_token_ids=set(), stop=[])


def test_the_first_runner():
    drafter, counters = Drafter(max_draft_tokens=3), dict.fromkeys(("tracked_requests", "untracked_requests"), 0)
    state = SimpleNamespace(num_prompt_tokens=0, prompt_token_ids=[], output_token_ids=[], sampling_params=SAMPLING)
    runner = SimpleNamespace(requests={"a": state}, input_batch=SimpleNamespace(req_ids=["a"]))
    tracked = TrackedRequests(runner, drafter, None, counters)
    for prompt, output in ((FIRST, ANSWER), (SECOND, [31])):
        state.num_prompt_tokens = len(prompt)
        state.prompt_token_ids = prompt
        state.output_token_ids = output
        texts = tokens(*prompt, *output)[None]
        tracked.update(0.0, [len(output)], np.array([texts.size]), texts)
    assert draft(drafter, "a") == GOES_ON
    runner.requests.clear()
    tracked.release_finished()
    assert not tracked.states


def test_the_second_runner():
    drafter, counters = Drafter(max_draft_tokens=3), dict.fromkeys(followed_requests.COUNTERS, 0)
    followed = FollowedRequests(drafter, counters)
    for prompt, output in ((FIRST, ANSWER), (SECOND, [31])):
        request = SimpleNamespace(
            req_id="a", prefill_token_ids=prompt, prompt_len=len(prompt), sampling_params=SAMPLING
        )
        followed.schedule(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[request]))
        copied = SimpleNamespace(synchronize=lambda: None)
        step = followed_requests.Step(["a"], np.array([output]), np.array([len(output)]), copied)
        followed.end_step(step)
        followed.read(0.0)
    assert draft(drafter, "a") == GOES_ON
