"""A folder in place of Mooncake's network, for vLLM's own MooncakeStoreConnector on a CPU."""
