"""Forced text on vLLM's second model runner, made of numpy and torch."""

from types import SimpleNamespace

import torch

from sam.vllm.bench.forced_text import ForcedText, sampling_arguments

RESPONSES = [[10, 11, 12], [20], [30, 31]]


def test_the_second_model_runner():
    """By slots of its requests and places of tokens in their texts, as the device knows them."""
    counted = []
    sampled = torch.full((5,), 99)
    runner = SimpleNamespace(
        device=torch.device("cpu"),
        max_num_reqs=4,
        req_states=SimpleNamespace(
            prompt_len=SimpleNamespace(gpu=torch.tensor([4, 6, 5, 0])), req_id_to_index={"a": 0, "b": 2, "c": 1}
        ),
        add_requests=lambda scheduled: counted.append(len(scheduled.scheduled_new_reqs)),
        sampler=SimpleNamespace(sample=lambda logits, expanded_idx_mapping, idx_mapping_np, pos: (sampled, logits)),
    )
    forced = ForcedText.attach(runner)
    assert ForcedText.attach(runner) is forced
    forced.set_responses(RESPONSES)
    told = [sampling_arguments(number, RESPONSES[number])["extra_args"] for number in (0, 1)]
    new = [
        SimpleNamespace(req_id=name, sampling_params=SimpleNamespace(extra_args=one))
        for name, one in zip("abc", [*told, None], strict=True)
    ]
    runner.add_requests(SimpleNamespace(scheduled_new_reqs=new))
    runner.add_requests(SimpleNamespace(scheduled_new_reqs=[]))
    slots = torch.tensor([2, 0, 0, 0, 1], dtype=torch.int32)  # of a's last token and two drafts, and c, not forced
    places = torch.tensor([4, 4, 5, 6, 5])
    tokens, logits = runner.sampler.sample("logits", slots, None, pos=places)
    assert tokens.tolist() == [20, 11, 12, 99, 99] and logits == "logits" and counted == [3, 0]
