"""mlmclm: how should this text encoder be pretrained, and how sure can we be?"""

__version__ = "0.1.0"
