"""The results folder: schema, files, lookup."""
