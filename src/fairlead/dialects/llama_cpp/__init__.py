"""The native API of llama.cpp's server."""
