"""The matrix as one page."""
