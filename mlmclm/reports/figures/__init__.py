"""The figures of the report: one file a group, a subclass of `drawing.FigureGroup`."""
