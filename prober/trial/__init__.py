"""One launch of vLLM in isolation: start, watch, ask, end."""
