"""Does speculation pay for this model, engine and load? Measured beside vLLM as it is shipped."""
