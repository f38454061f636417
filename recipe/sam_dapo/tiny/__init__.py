"""The tiny world for CPU machines: a verifiable task, its tokenizer and a small warm-started Qwen3."""
