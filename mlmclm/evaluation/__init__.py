"""Zero-shot evaluation of language models, encoders and decoders alike."""
