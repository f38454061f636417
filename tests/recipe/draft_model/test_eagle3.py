"""An EAGLE3 head trained on a tiny target's responses: what it computes and is saved as."""

import json
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from sam_recipe.draft_model.distil import Settings, states_of
from sam_recipe.draft_model.eagle3 import Head, layers_read
from tests.sam.engine.eagle_head import ReferenceHead


def test_unrolled_steps_are_the_drafts_of_the_saved_head(target, tmp_path):
    """Training computes what a head drafts from every token at once; the reference drafts from one text."""
    head = Head(target, Settings(seed=3))
    head.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert "embed_tokens.weight" not in weights and {"fc.weight", "midlayer.self_attn.q_proj.weight"} < weights.keys()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    reference = ReferenceHead(SimpleNamespace(network=target), tmp_path)
    with torch.no_grad():
        for begin in (3, 6, 9):
            text = torch.randint(20, (begin,)).tolist()
            draft = reference.draft(text, 3)
            ids = torch.tensor([text + draft])
            passes = head(ids, states_of(target, head.layers_read, ids), 3)
            found = [head.lm_head(states[0, begin - 1 + pass_]).argmax() for pass_, states in enumerate(passes)]
            assert found == draft


def test_layers_that_are_read():
    assert [layers_read(count) for count in (1, 2, 4, 6, 36)] == [[0, 1], [0, 1, 2], [0, 2, 4], [0, 3, 6], [2, 18, 33]]
