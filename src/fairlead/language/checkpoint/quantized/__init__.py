"""Folders whose matrices are codes with scales: compressed-tensors, GPTQ, AWQ, and 8-bit floats."""
