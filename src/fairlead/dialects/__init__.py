"""The dialects of the API: how clients write requests, and how they read answers and errors."""
