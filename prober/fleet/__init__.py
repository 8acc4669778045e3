"""Many combinations on many machines, every night."""
