"""A target's own multi-token-prediction modules as a drafter (DeepSeek-V3, arXiv 2412.19437; MiMo, 2505.07608)."""
