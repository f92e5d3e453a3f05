"""``chambers api``: an endpoint with OpenAI's API for fine-tuned models."""
