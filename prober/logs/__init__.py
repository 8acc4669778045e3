"""Start-up logs of vLLM: from bytes to a verdict, and from a verdict to advice. Pure."""
