"""A byte-level tokenizer with tokens for signed digits, and a chat template in Qwen's style."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD_TOKEN = "<|endoftext|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (any text survives a round trip), one per signed digit, and three special ones."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(sign, digit) for sign in "+-" for digit in "123456789"]
    entries = [*symbols, *map("".join, merges), PAD_TOKEN, MESSAGE_START, MESSAGE_END]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=MESSAGE_END,
        pad_token=PAD_TOKEN,
        additional_special_tokens=[MESSAGE_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def encode_prompt(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    """Token ids of a user's question up to where the assistant's message begins."""
    chat = [{"role": "user", "content": question}]
    return _encode(tokenizer, tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))


def encode_response(tokenizer: PreTrainedTokenizerFast, solution: str) -> list[int]:
    """Token ids of the assistant's message, its end token included."""
    return [*_encode(tokenizer, solution), tokenizer.eos_token_id]


def _encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """As `tokenizer.encode`, without the options that transformers sets anew for every text."""
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
