"""What is noted of one followed request, on a runner without vLLM."""

from types import SimpleNamespace

from sam.vllm.bench.extension import FollowedRequest


def runner(steps):
    """Gives (drafts, tokens) of each step by request."""
    left = iter(steps)
    made = SimpleNamespace(tokens=None)

    def execute_model(scheduled):
        return None

    def sample_tokens():
        tokens = next(left)
        index = {name: row for row, name in enumerate(tokens)}
        return SimpleNamespace(req_id_to_index=index, sampled_token_ids=list(tokens.values()))

    made.execute_model, made.sample_tokens = execute_model, sample_tokens
    return made


def test_one_request_is_followed_wherever_its_row_is():
    one = runner([{"1-0-ab": [], "1-01-cd": [9]}, {"1-01-cd": [3], "1-0-ab": [5]}, {"1-0-ab": [6, 7]}, {"1-0-ab": [1]}])
    followed = FollowedRequest.attach(one)
    assert FollowedRequest.attach(one) is followed
    followed.start("1-0")
    for drafts in ({}, {}, {"1-0-ab": [6, 8]}):
        one.execute_model(SimpleNamespace(scheduled_spec_decode_tokens=drafts))
        one.sample_tokens()
    assert followed.take() == [([], [5]), ([6, 8], [6, 7])]
    one.execute_model(SimpleNamespace(scheduled_spec_decode_tokens={}))
    one.sample_tokens()
    assert followed.take() == [([], [5]), ([6, 8], [6, 7])]  # nothing was added after the first take


def test_tokens_still_on_a_device_are_left_out():
    one = SimpleNamespace(execute_model=lambda scheduled: None, sample_tokens=lambda: SimpleNamespace(get_output=None))
    followed = FollowedRequest.attach(one)
    followed.start("1-0")
    one.execute_model(SimpleNamespace())
    one.sample_tokens()
    assert followed.take() == []
