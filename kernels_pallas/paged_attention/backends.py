"""The names of the implementations, apart from them so that a configuration needs no JAX."""

BACKENDS = ("auto", "reference", "xla")
