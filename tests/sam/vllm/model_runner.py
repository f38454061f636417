"""What a proposer needs of vLLM, without vLLM."""

from types import SimpleNamespace

import numpy as np

from sam.vllm.proposer import SamProposer

LENGTH = 64


class Runner:
    """What a proposer reads of vLLM's model runner: the batch's rows, and which requests exist."""

    def __init__(self, vllm_config=None):
        self.requests, self.texts = {}, {}
        self.vllm_config, self.input_batch = vllm_config, SimpleNamespace(req_ids=[])

    def add(self, name, prompt, sampling_params=None):
        self.requests[name] = SimpleNamespace(
            prompt_token_ids=prompt, num_prompt_tokens=len(prompt), output_token_ids=[], sampling_params=sampling_params
        )
        self.texts[name] = list(prompt)

    def step(self, proposer, batch, new):
        """One engine step with `batch` as rows, in which each request's `new` tokens came out."""
        tokens = np.zeros((8, LENGTH), np.int32)
        counts = np.zeros(8, np.int32)
        self.input_batch.req_ids = list(batch)
        for row, name in enumerate(batch):
            self.texts[name] += new.get(name, [])
            self.requests[name].output_token_ids += new.get(name, [])
            text = self.texts[name]
            tokens[row, : len(text)], counts[row] = text, len(text)
        drafts = proposer.propose([new.get(name, []) for name in batch], counts, tokens)
        return dict(zip(batch, drafts, strict=True))


def make_proposer(**settings):
    config = SimpleNamespace(
        additional_config={"speculation": {"policy": "always", **settings}},
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
        model_config=SimpleNamespace(max_model_len=LENGTH, model="a model"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, distributed_executor_backend="uni"),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )
    made = SamProposer(config)
    made.runner = Runner(config)
    made.bind(made.runner)
    return made
