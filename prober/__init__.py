"""The proven ceiling of vLLM's ``max_model_len``."""

__version__ = "0.1.0"
