"""Models whose layers keep a state of the whole text: vLLM 0.23 loses it between steps with drafts and steps without.

Root cause: a step with drafts leaves one state behind every draft token, and the next step has to begin with the one
behind the last accepted token. The builders of vllm/v1/attention/backends (gdn_attn.py, mamba_attn.py) find it only
where that next step has drafts too, and take the first one where it has none; linear_attn.py and short_conv_attn.py do
not know drafts at all. Symptom: other text, with an acceptance that looks well. vLLM's own MTP heads draft in every
step. Can go when vLLM keeps these states: https://github.com/vllm-project/vllm/pull/56531, released with 0.32.
"""

# vLLM's names of drafters after whose steps one without drafts may follow.
MAY_PAUSE = ("custom_class", "ngram", "ngram_gpu", "suffix", "draft_model", "eagle3")
# What models call their other layers.
WITHOUT_STATE = {"attention", "full_attention", "sliding_attention", "chunked_attention", "moe", "mlp"}


def kind(model_config) -> str | None:
    """What a model calls its layers with recurrent state, by vLLM's ModelConfig; None without such layers."""
    if not (model_config.is_hybrid or model_config.is_attention_free):
        return None
    config = model_config.hf_text_config
    layers = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return ", ".join(sorted(set(layers) - WITHOUT_STATE)) or f"{config.model_type}'s recurrent"


def check(model_config, method: str | None) -> None:
    """Refuse drafts, by vLLM's name of the drafter, for a model with such layers.

    Raises:
        ValueError: names the layers.
    """
    if method in MAY_PAUSE and (layers := kind(model_config)):
        raise ValueError(
            f"speculative_config: no drafts for a model with {layers} layers, whose state vLLM 0.23 loses behind "
            "accepted ones, so that the text changes: set speculation=off, or leave speculative_config out"
        )
