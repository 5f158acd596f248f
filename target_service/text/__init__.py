"""How text becomes tokens and back: tokenizer files, chat templates, incremental decoding, stop strings, names."""
