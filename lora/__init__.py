"""LoRA adapters. Nothing is here yet; `checkpoint.index` already recognises an adapter and says that it is no model."""
