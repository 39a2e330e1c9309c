"""A job's answer: deltas and the sinks they go to, attempts, replay after a failure, relayed responses."""
