"""A load generator for any OpenAI-compatible server: what `fairlead bench` runs."""
