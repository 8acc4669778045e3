"""One launch of vLLM in isolation: started, watched, asked, ended."""
