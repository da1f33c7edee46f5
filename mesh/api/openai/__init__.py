"""The OpenAI API: what its bodies mean, and the shapes of its answers."""
