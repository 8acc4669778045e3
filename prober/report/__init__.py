"""Reports: the matrix as one HTML page or a Markdown table."""
