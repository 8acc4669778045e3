"""vLLM as it is installed: its versions, flags, commands, and where it keeps models."""
