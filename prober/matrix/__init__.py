"""The results: their schema, their files, and what is looked up in them."""
