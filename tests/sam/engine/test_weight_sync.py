"""Real engines with vLLM's packed kernel in all linear layers: tokens after weight syncs. With drafts they
are in test_compiled.py."""

from types import SimpleNamespace

import pytest
import torch

from sam.vllm import row_classes
from tests.sam.engine.tiny_engine import Engine, save_model

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(row_classes, "CACHE_FOLDER", tmp_path / "classes")


@pytest.fixture(params=[False, True], ids=["", "tied"], scope="module")
def model(request, tmp_path_factory):
    sharpness = 6.0 if request.param else 25.0  # tied, a sharper one repeats its input
    return save_model(tmp_path_factory.mktemp("model"), sharpness, tied=request.param)


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """The model after a few steps of something like training."""
    path = tmp_path_factory.mktemp("trained")
    network = model.network
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    network.save_pretrained(path)
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    network.load_state_dict(before)
    return SimpleNamespace(path=str(path), weights=weights)


def buckets(weights):
    """As verl sends them: in several parts, without the head where it is tied."""
    items = list(weights.items())
    if any(name == "lm_head.weight" and tensor.equal(weights["model.embed_tokens.weight"]) for name, tensor in items):
        items = [(name, tensor) for name, tensor in items if name != "lm_head.weight"]
    return items[::2], items[1::2]


def as_verl(runner, new):
    """vLLMColocateWorkerExtension.update_weights_from_ipc of verl 0.9.1: parts, then processing, once."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    by_load_weights(runner, new)
    process_weights_after_loading(runner.model, runner.model_config, runner.device)


def by_load_weights(runner, new):
    for part in buckets(new.weights):
        runner.model.load_weights(iter(part))


def processed_only(runner, new):
    """Written past `load_weights`, as verl's own quantised and buffer updates; processed then."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    type(runner.model).load_weights(runner.model, iter(sum(buckets(new.weights), [])))
    process_weights_after_loading(runner.model, runner.model_config, runner.device)


def by_reload_from_disk(runner, new):
    runner.reload_weights(weights_path=new.path)


@torch.no_grad()  # vLLM's own calls fail without
def by_reload_in_place(runner, new):
    """In the kernels' format: written to the parameters with no loader."""
    held = {name: parameter.detach().clone() for name, parameter in runner.model.named_parameters()}
    by_load_weights(runner, new)
    loaded = {name: parameter.detach().clone() for name, parameter in runner.model.named_parameters()}
    runner.reload_weights(weights_iterator=iter(held.items()), is_checkpoint_format=False)
    runner._dummy_run(2)  # packs the old ones
    runner.reload_weights(weights_iterator=iter(loaded.items()), is_checkpoint_format=False)


WAYS = (as_verl, by_load_weights, processed_only, by_reload_from_disk, by_reload_in_place)


def responses_after(llm, new, way):
    """Tokens of a few requests after weights were changed in one way."""
    from vllm import SamplingParams

    way(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner, new)
    llm.reset_prefix_cache()
    parameters = [SamplingParams(temperature=1.0, seed=row, max_tokens=24, ignore_eos=True) for row in range(12)]
    prompts = [{"prompt_token_ids": [row, row + 1, 7]} for row in range(12)]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, parameters, use_tqdm=False)]


def test_no_weight_sync_leaves_an_old_packed_copy(model, trained):
    first = SimpleNamespace(path=model.path, weights=model.network.state_dict())
    expected, found = {}, []

    def loaded_at_start(llm):
        expected[llm.model_config.model] = responses_after(llm, None, lambda runner, new: None)

    def synced(llm):
        for way in WAYS:
            for new in (trained, first):
                found.append((way.__name__, new.path, responses_after(llm, new, way)))

    for start, then in ((trained, loaded_at_start), (model, lambda llm: (loaded_at_start(llm), synced(llm)))):
        with Engine(start, batch=16) as engine:
            then(engine.llm)
    assert expected[trained.path] != expected[model.path]
    for way, path, tokens in found:
        assert tokens == expected[path], way
