"""The server as people start it: applications, listener, routes, authentication, commands."""
