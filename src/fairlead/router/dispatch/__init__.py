"""Scheduling: the queue, the seats, placement, model loads and wait estimates."""
