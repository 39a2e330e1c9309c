"""Compiled kernels, which take and return integers and buffers."""
