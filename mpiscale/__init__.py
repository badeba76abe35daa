"""Train large models in parallel: every strategy as explicit communication."""

__version__ = "0.1.0"
