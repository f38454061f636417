"""An engine that sleeps while the trainer has the device, and wakes for new weights, as verl's does: vLLM's own worker
with an allocator that is simulated, since a CPU's has none."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.sam.engine import matrix
from tests.sam.engine.test_weight_sync import as_verl, train, weights_of
from tests.v2.engines import ROWS, engine

pytestmark = pytest.mark.engine


class Allocator:
    """Of vLLM's sleep mode: what is allocated under a tag is lost in sleep, unless the tag's memory is kept."""

    def __init__(self):
        self.allocated: dict[int, tuple[str, torch.Tensor]] = {}
        self.kept: dict[int, torch.Tensor] = {}

    @contextmanager
    def use_memory_pool(self, tag):
        class Mode(TorchDispatchMode):
            def __torch_dispatch__(mode, function, types, arguments=(), keywords=None):
                result = function(*arguments, **keywords or {})
                for tensor in tree_leaves(result):
                    if isinstance(tensor, torch.Tensor):
                        self.allocated.setdefault(tensor.untyped_storage().data_ptr(), (tag, tensor))
                return result

        with Mode():
            yield

    def sleep(self, offload_tags):
        for address, (tag, tensor) in self.allocated.items():
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            if tag in offload_tags:
                self.kept[address] = whole.clone()
            whole.fill_(0x7F)  # as float32 3.4e38: not a number would pass through the attention's mask

    def wake_up(self, tags):
        for address, (tag, tensor) in self.allocated.items():
            if address in self.kept and tag in tags:
                torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).copy_(self.kept.pop(address))


@pytest.fixture
def allocator(monkeypatch):
    from vllm.v1.worker import cpu_worker, gpu_worker

    found = Allocator()
    monkeypatch.setattr(gpu_worker, "get_mem_allocator_instance", lambda: found)
    monkeypatch.setattr(gpu_worker.Worker, "_maybe_get_memory_pool_context", lambda _, tag: found.use_memory_pool(tag))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    for name in ("sleep", "wake_up"):
        monkeypatch.setattr(cpu_worker.CPUWorker, name, getattr(gpu_worker.Worker, name))
    return found


def test_new_weights_after_sleep_of_both_levels(model, allocator, tmp_path):
    trained = train(matrix.save(tmp_path), tmp_path)  # beside the tokenizer
    with engine(model) as own:
        of_model = matrix.run(own, ROWS)
    with engine(trained) as own:
        of_trained = matrix.run(own, ROWS)
    assert [one.tokens for one in of_trained] != [one.tokens for one in of_model]
    allocator.allocated.clear()
    with engine(model, "sam") as own:
        assert {tag for tag, _ in allocator.allocated.values()} == {"weights", "kv_cache"}
        for level, weights, expected in ((1, weights_of(trained), of_trained), (2, weights_of(model), of_model)):
            own.llm.sleep(level)
            own.llm.wake_up(["weights"])
            is_lost = any((tensor > 1e38).any() for tensor in own.runner.model.state_dict().values())
            assert is_lost == (level == 2)
            as_verl(own.runner, weights, None)
            own.llm.wake_up(["kv_cache"])
            matrix.assert_same(matrix.run(own, ROWS), expected, ROWS, by=1e-4)
            assert own.count()["accepted"] > 5
        assert own.counters()["draft_errors"] == 0
