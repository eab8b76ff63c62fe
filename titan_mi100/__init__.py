"""titan_mi100: a native PyTorch trainer for Qwen models."""

__version__ = "0.1.0"
