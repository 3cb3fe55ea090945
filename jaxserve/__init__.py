"""jaxserve: an exact LLM inference engine for JAX."""
