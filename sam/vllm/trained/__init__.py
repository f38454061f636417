"""Draft models: vLLM's drafter `draft_model` with a switch, alone or beside sam."""
