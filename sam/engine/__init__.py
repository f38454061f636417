"""The drafter of one engine: requests and steps in, drafts out; no vLLM in it."""
