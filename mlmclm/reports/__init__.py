"""Reports: figures, HTML pages and model cards."""
