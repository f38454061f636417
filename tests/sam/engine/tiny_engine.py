"""A real vLLM engine on CPU, in this process, with a random Qwen3 whose text repeats."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import contextlib
import gc
from pathlib import Path
from types import SimpleNamespace

import torch
import zmq
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from sam.config import SpeculationConfig
from sam.vllm import plugin

# vLLM freezes the whole heap when an engine starts, unfreezes it when one ends, and collects garbage six times, half a
# second each over all that was imported. Here what is left when an engine has ended is frozen for good.
freeze, gc.freeze, gc.unfreeze = gc.freeze, lambda: None, lambda: None
VOCABULARY, LONGEST = 300, 256
# What most files ask: three groups of four that share a prompt, greedy and drawn. The first is longer, and reaches the
# longest length while all others are on their way.
PROMPTS = [[1 + group, 7, 30 + 3 * group, 2, 9 + group, 40] * 3 for group in range(3) for _ in range(4)]
PROMPTS[0] = PROMPTS[0] * 11
SETTINGS = [
    {"temperature": 0.5 * (row % 3), "max_tokens": 60 + 3 * row if row else LONGEST - len(PROMPTS[0]), "seed": row}
    for row in range(len(PROMPTS))
]
COUNTERS = {
    "spec_decode_num_draft_tokens": "drafted",
    "spec_decode_num_accepted_tokens": "accepted",
    "num_preemptions": "preemptions",
}


def save_model(path, sharpness: float = 25.0, vocabulary: int = VOCABULARY, tied: bool = False) -> SimpleNamespace:
    """Peaked outputs, so that drafts are accepted now and then, and a tokenizer of one word a token."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    network = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        network.lm_head.weight.mul_(sharpness)
    network.save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(path)
    return SimpleNamespace(path=str(path), network=network.eval())


def _contexts() -> set[zmq.Context]:
    return {one for one in gc.get_objects() if isinstance(one, zmq.Context)}


@contextlib.contextmanager
def started(**arguments):
    """vLLM's LLM with these arguments, of whose ranks nothing is left afterwards."""
    from vllm import LLM

    plugin.register()
    has_ranks = arguments.get("tensor_parallel_size", 1) > 1
    shared_before, contexts_before = set(Path("/dev/shm").glob("*-cpushm_*")), _contexts() if has_ranks else set()
    llm = LLM(**arguments)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        # vLLM's queues between ranks leave theirs open. Garbage collection may come to a context before its sockets,
        # and then waits for these forever, in whichever test it happens.
        for context in _contexts() - contexts_before if has_ranks else ():
            context.destroy(linger=0)
        del llm
        gc.collect()
        freeze()
        # vLLM's ranks on a CPU leave the memory through which they speak (csrc/cpu/shm.cpp).
        for memory in set(Path("/dev/shm").glob("*-cpushm_*")) - shared_before:
            memory.unlink()


class Engine:
    """vLLM's LLM with this project's section, for any number of requests after each other; closed by `with`.

    Args:
        method: of speculation; None: off.
        speculation: further keys of the section.
        arguments: further ones of vLLM's LLM.

    Attributes:
        llm: vLLM's.
        runner: its model runner, where there is one rank.
    """

    def __init__(self, model, method=None, batch=64, asynchronous=False, ranks=1, speculation=None, **arguments):
        usual = {"policy": "threshold", "batch_size_threshold": 1000, "num_speculative_tokens": 3}
        config = SpeculationConfig(method=method or "off", **usual | (speculation or {}))
        own = {
            "model": model.path, "max_model_len": LONGEST, "max_num_seqs": batch, "dtype": "float32", "seed": 0,
            "enforce_eager": True, "async_scheduling": asynchronous, "num_gpu_blocks_override": 512,
            "max_num_batched_tokens": 1024,
            "tensor_parallel_size": ranks, "distributed_executor_backend": "mp" if ranks > 1 else "uni",
            "disable_log_stats": False,
        }  # fmt: skip
        self._started = started(**own | config.vllm_arguments(asynchronous) | arguments)
        self.llm, self.runner, self._counted = self._started.__enter__(), None, {}
        if ranks == 1:
            self.runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def __enter__(self):
        return self

    def __exit__(self, *error):
        del self.llm, self.runner
        self._started.__exit__(*error)

    def counters(self) -> dict[str, int]:
        """What this project's drafter has counted since the start."""
        return dict(getattr(getattr(self.runner, "drafter", None), "counters", {}))

    def count(self) -> dict[str, int]:
        """What vLLM has counted since the last call."""
        before, self._counted = self._counted, {one.name: getattr(one, "value", 0) for one in self.llm.get_metrics()}
        found = {name: self._counted.get(f"vllm:{name}", 0) - before.get(f"vllm:{name}", 0) for name in COUNTERS}
        return {COUNTERS[name]: value for name, value in found.items()}

    def generate(self, prompts=PROMPTS, settings=SETTINGS, logprobs=2) -> SimpleNamespace:
        """Tokens of every prompt, log-probabilities of each token and of the likeliest ones, and what vLLM and the
        drafter counted meanwhile.

        Args:
            settings: keywords of SamplingParams, one for each prompt.
        """
        from vllm import SamplingParams

        common = {"temperature": 1.0, "logprobs": logprobs, "ignore_eos": True, "detokenize": False}
        parameters, before = [SamplingParams(**common | own) for own in settings], self.counters()
        self.llm.reset_prefix_cache()  # as if nothing had been asked before
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        return SimpleNamespace(
            tokens=[one.token_ids for one in answers],
            logprobs=[
                [{token: entry.logprob for token, entry in step.items()} for step in one.logprobs or []]
                for one in answers
            ],
            counters={name: value - before.get(name, 0) for name, value in self.counters().items()},
            **self.count(),
        )


def assert_same(found: SimpleNamespace, expected: SimpleNamespace) -> None:
    """Every token and log-probability."""
    assert found.tokens == expected.tokens and found.logprobs == expected.logprobs
