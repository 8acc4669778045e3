"""This machine: its GPUs, who uses them, and what else a measurement needs."""
