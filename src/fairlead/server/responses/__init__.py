"""What is kept of OpenAI's Responses, and the routes and tasks that use it."""
