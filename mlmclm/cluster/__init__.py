"""Ray clusters: sessions on a private or a running one, their capacity, and the environment of their workers."""
