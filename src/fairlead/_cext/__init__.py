"""Compiled kernels: integers and buffers in, integers and buffers out."""
