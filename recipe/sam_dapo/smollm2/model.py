"""SmolLM2-135M-Instruct as a model folder, from its GGUF file.

transformers takes the file's tokenizer for a Llama tokenizer: it puts a begin token before every text, adds tokens that
the model has no rows for, and saved and loaded again it has lost its byte-level decoder. So the tokenizer is put
together here from the file's own fields.
"""

from pathlib import Path

import torch
from gguf import GGUFReader, TokenType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast


def build_tokenizer(gguf_file: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of SmolLM2-Instruct: byte-level BPE over words and single digits, with a chat template."""
    fields = {name: field.contents() for name, field in GGUFReader(gguf_file).fields.items() if "tokenizer" in name}
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # What the published tokenizer.json has where the file says `tokenizer.ggml.pre` is "smollm".
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        additional_special_tokens=[token for token, kind in types if kind == TokenType.CONTROL],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


def save_model(gguf_file: Path, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes weights in float32, config and generation config of SmolLM2-Instruct, and the tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    model.config.rms_norm_eps = 1e-5  # the file has it in float32
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model.generation_config = GenerationConfig(**ids, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
