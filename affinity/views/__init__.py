"""A plan as text, as SVG, as a value that notebooks show, with its alternatives, and compared with another plan."""
