"""vLLM's startup logs: from bytes to a verdict. Pure."""
