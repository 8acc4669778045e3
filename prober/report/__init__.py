"""The matrix as one HTML page or Markdown table."""
