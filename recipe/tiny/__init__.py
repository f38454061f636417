"""A tiny world for CPU machines: a verifiable task, its tokenizer, and a warm-started Qwen3 of under a million weights."""
