"""This machine: GPUs, leases, processes, memory."""
