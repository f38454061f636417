"""Further paths of a request in vLLM: each is verified in a row of its own, beside the request's."""
