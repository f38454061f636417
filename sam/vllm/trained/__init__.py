"""Draft models: vLLM's drafter `draft_model` with a switch, alone or beside sam."""

# Of a TrainedProposer, beside a SamProposer's.
COUNTERS = (
    "draft_model_steps",
    "draft_model_rests",
    "draft_model_passes",
    "draft_model_requests",
    "draft_model_read_tokens",
    "draft_model_drafted_tokens",
    "draft_model_accepted_tokens",
    "draft_model_errors",
    "draft_model_invalid_drafts",
)
