"""From a request to recorded rows: searches made of trials."""
