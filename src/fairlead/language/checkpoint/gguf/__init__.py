"""A checkpoint that is a GGUF file, or several that a model was split into. `checkpoint.py` is its door."""
