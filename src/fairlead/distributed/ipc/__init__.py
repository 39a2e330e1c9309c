"""Connections between the processes of one server: frames over a Unix socket or TCP, with authentication."""
