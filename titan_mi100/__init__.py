"""titan_mi100: a native PyTorch trainer for Qwen3."""
