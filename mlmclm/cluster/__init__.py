"""Ray clusters: sessions on one of this machine or of others, the place that they have, and the workers' environment."""
