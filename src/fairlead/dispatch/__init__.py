"""Who sits where, and when: the queue, the seats, the estimates."""
