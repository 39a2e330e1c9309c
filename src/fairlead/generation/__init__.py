"""From a caller's request to its answer: the gateway, the times of a job, and what is counted."""
