"""Every vLLM that this project may meet, one after the other: `bash scripts/test.sh --versions`."""
