"""mlmclm: how should this text encoder be pretrained, and how surely do we know?"""

__version__ = "0.1.0"
